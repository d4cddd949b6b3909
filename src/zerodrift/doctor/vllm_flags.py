"""Words of a vLLM command line as its own parser takes them: flags with their values, and what it refuses."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, reduce
from typing import Any, NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.listed import may_be_attached
from zerodrift.doctor.secrets import hidden, names_a_secret, safe
from zerodrift.doctor.setting import Origin, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, Number, Options, VllmName, vllm_names, vllm_options

_NEGATIVE = re.compile(r"-\d")
_LEVEL = re.compile(r"-O=?(.+)")
_LETTERS = ("n", "q", "r")
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED = re.compile(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]")  # decimals go with powers of ten alone
_MOST = 20
"""Of names in a sentence; some flags have forty choices."""


class Argument(NamedTuple):
    """One flag, and the words it is made of."""

    name: str
    """Without dashes and `no-`, hyphens for underscores, aliases resolved."""
    key: str
    """Behind a dot, as in `--hf-overrides.head_dtype`; otherwise empty."""
    values: tuple[str, ...]
    on: bool
    """False for the `--no-` form of a switch."""
    first: int
    """Index of its first word."""
    last: int
    """Index of its last word; the same where the value is behind a `=`."""
    candidates: tuple[str, ...] = ()
    """What it may be short for, where that is more than one flag: vLLM refuses to guess."""

    @property
    def value(self) -> str:
        """Its only value, or its last."""
        return self.values[-1] if self.values else ""


class Parsed(NamedTuple):
    """A command line of vLLM, behind its program."""

    arguments: tuple[Argument, ...]
    positionals: tuple[int, ...] = ()
    """Indices of words that belong to no flag; the first is the model."""
    strays: tuple[int, ...] = ()
    """Indices of words behind a secret that belong to no flag: pieces of it, perhaps, so not to be named."""

    def last(self, name: str | None) -> Argument | None:
        """The one in force: argparse takes the last."""
        return next((each for each in reversed(self.arguments) if each.name == name), None)

    def taken(self) -> "Parsed":
        """Without what vLLM refuses: that is in force nowhere."""
        return self._replace(arguments=tuple(each for each in self.arguments if refusal(each) is None))

    def json(self, flag: str | None) -> dict[str, Any] | None:
        """The JSON in force of a flag that takes one; None where it is not given.

        vLLM puts dotted forms together and behind all others, and argparse takes the last: one dotted form undoes
        every whole JSON, and of those the last counts.
        """
        given = [each for each in self.arguments if each.name == flag]
        dotted = [mapping(each) for each in given if each.key]
        whole = [mapping(each) for each in given if not each.key]
        return reduce(merged, dotted) if dotted else whole[-1] if whole else None

    def inside(self, spec: VllmName) -> bool:
        """Whether a JSON says the setting that has a flag of its own as well."""
        return spec.inner is not None and spec.inner.key in (self.json(spec.inner.flag) or {})


def parse(words: Sequence[str], start: int = 0) -> Parsed:
    """The flags in `words` from index `start` on."""
    options = vllm_options()
    arguments: list[Argument] = []
    positionals: list[int] = []
    strays: list[int] = []
    masks = list(hidden(words, flag_names()))
    index = start
    while index < len(words):
        secret = (masks[index] or "").startswith(("'", '"'))
        if secret or not _is_flag(words[index]):
            (strays if secret else positionals).append(index)
            index += 1
            continue
        argument = _argument(words, index, options)
        arguments.append(argument)
        index = argument.last + 1
    if strays and not positionals and all(each.name != "model" for each in arguments):
        positionals.append(strays.pop(0))  # the only word that can be the model
    return Parsed(tuple(arguments), tuple(positionals), tuple(strays))


def mapping(argument: Argument) -> dict[str, Any]:
    """The JSON of one argument; dotted forms are one key of it, or one inside another."""
    if argument.key:
        value = _plain(argument.value)
        for name in reversed(argument.key.split(".")):
            value = {name: value}
        return dict(value)
    try:
        found = json.loads(argument.value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the value of --{argument.name} is not JSON; quote it for the shell") from error
    if not isinstance(found, dict):
        raise ConfigError(f'--{argument.name} takes a JSON object, as in \'{{"key": "value"}}\'')
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with dictionaries put together at every depth; of all else what is `above` counts."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def number(text: str) -> int | float | str:
    """`8k` as vLLM counts it; what is no number stays text."""
    try:
        if text[-1:] in _SCALES:
            return int(float(text[:-1]) * _SCALES[text[-1]])
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def refusal(argument: Argument, *, value_known: bool = True) -> str | None:
    """Why vLLM would not start with it; None where it would."""
    options, name, shown = vllm_options(), argument.name, safe(argument.value)
    if argument.candidates:
        return f"--{safe(name)} could be {_listed(f'--{each}' for each in argument.candidates)}"
    if name not in options.names:
        return no_such_flag(name)
    if not argument.key and argument.values and name in (*options.switches, *options.bare):
        instead = f" or --no-{name}" if name in options.switches else ""
        return f"--{name} takes no value, only --{name}{instead}"
    if not argument.values or not value_known:
        return None
    if name in options.choices and argument.value not in options.choices[name]:
        return f"--{name} {shown} is none of {_listed(options.choices[name])}"
    number_of = options.numbers.get(name)
    wrong = number_of is not None and not _is_number(argument.value, number_of)
    return f"--{name} {shown} is no number ({number_of})" if wrong else None


def refusals(parsed: Parsed) -> list[str | None]:
    """The same of each flag, and of words that strayed behind a secret."""
    strayed = "a word behind a secret belongs to no flag" if parsed.strays else None
    return [*map(refusal, parsed.arguments), strayed]


def variable_refusal(spec: VllmName, text: str) -> str | None:
    """Why vLLM stops at what a variable says."""
    if spec.kind != "switch" or spec.words or _is_number(text, "integer"):
        return None
    return f"{spec.env}={safe(text)} is no number: vLLM takes 1 or 0"


def variable_refusals(env: Mapping[str, str]) -> list[str | None]:
    """The same of each that is judged."""
    return [
        variable_refusal(spec, env[spec.env])
        for spec in vllm_names().values()
        if spec.env in env and spec.env
    ]


def refused(reasons: Iterable[str | None]) -> Setting:
    """All of them in one line; None where vLLM has nothing against it."""
    return Setting("refused", "; ".join(dict.fromkeys(filter(None, reasons))) or None, Origin.SET)


def no_such_flag(name: str) -> str:
    """That vLLM does not have it, and which may have been meant."""
    close = get_close_matches(name, vllm_options().names, n=1)
    meant = f"; did you mean --{close[0]}?" if close else ""
    return f"--{safe(name)} is no flag of vLLM {VLLM_VERSION}{meant}"


def typed(name: str, value: Value) -> str | None:
    """Flag or variable, ready to be copied; None where vLLM has no such setting."""
    spec = vllm_names().get(name)
    if spec is None:
        return None
    if spec.env is not None:
        return f"remove {spec.env}" if value is None else f"{spec.env}={shell_value(value)}"
    if value is None or (spec.kind == "presence" and not value):
        return f"remove --{spec.flag}"
    return flag_words(spec, value)


def flag_words(spec: VllmName, value: Value, between: str = " ") -> str:
    """A flag with its value, quoted for the shell."""
    if isinstance(value, bool):
        return f"--{spec.flag}" if value else f"--no-{spec.flag}"
    text = shell_value(value)
    if spec.key is not None:
        text = json.dumps({spec.key: value}, separators=(",", ":"))
    return f"--{spec.flag}{between}{shlex.quote(text)}"


def shell_value(value: Value) -> str:
    """A value as the shell writes it; variables of vLLM are integers."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@cache
def flag_names() -> frozenset[str]:
    """Everything that is a flag of vLLM, however it is spelled, and holds no secret."""
    options = vllm_options()
    known = {*options.long, *options.short}
    return frozenset(
        name for each in known for name in (each, each.replace("-", "_")) if not names_a_secret(name)
    )


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


def _argument(words: Sequence[str], index: int, options: Options) -> Argument:
    if level := _LEVEL.fullmatch(words[index]):
        return Argument("optimization-level", "", (level[1],), on=True, first=index, last=index)
    if words[index] == "-O" and "".join(words[index + 1 : index + 2]) in ("0", "1", "2", "3"):
        return Argument("optimization-level", "", (words[index + 1],), on=True, first=index, last=index + 1)
    spelled, equals, behind = words[index].partition("=")
    whole, _, key = spelled.partition(".")
    name, off, candidates = _resolved(whole, options)
    if equals:
        return Argument(name, key, (behind,), not off, index, index, candidates)
    if whole[1:2] in _LETTERS and whole[2:] and name == options.short[whole[1]]:
        return Argument(name, key, (whole[2:],), on=True, first=index, last=index)
    if not key and name in (*options.switches, *options.bare):
        return Argument(name, key, (), not off, index, index)
    end = index + 1
    most = len(words) if name in options.lists else index + 2
    while end < min(most, len(words)) and not _is_flag(words[end]):
        end += 1
    if end == index + 1 and (key or name in options.values):
        raise ConfigError(f"--{name} stands without its value; write one behind it, or take the flag out")
    values = tuple(words[index + 1 : end])
    return Argument(name, key, values, on=True, first=index, last=end - 1, candidates=candidates)


def _resolved(spelled: str, options: Options) -> tuple[str, bool, tuple[str, ...]]:
    """The flag that is meant, whether its `--no-` form, and all that may be meant where it is short for several."""
    short = not spelled.startswith("--")
    if not short:
        bare, known = spelled[2:].replace("_", "-"), options.long
    else:
        bare, known = spelled[1:], options.short
        if bare[:1] in _LETTERS:  # `-qfp8`, as compilers have it
            bare = bare[:1]
    # argparse takes any beginning of a flag for the flag, if it is the beginning of one alone.
    found = [bare] if bare in known else sorted(each for each in known if bare and each.startswith(bare))
    if len(found) == 1:
        name = known[found[0]]
        return name, found[0] == f"no-{name}", ()
    if not found and short and may_be_attached(bare):
        bare = bare[:1]
    return bare, False, tuple(found)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return ", ".join(every[:_MOST]) + more


def _is_number(text: str, kind: Number) -> bool:
    word = text.strip()
    if "with a suffix" in kind and _SUFFIXED.fullmatch(word):
        return True
    if (kind == "with a suffix, or auto" and word.lower() == "auto") or (
        kind == "decimal or none" and word in ("", "None")
    ):
        return True
    try:
        float(word) if kind == "decimal or none" else int(word)
    except ValueError:
        return False
    return True
