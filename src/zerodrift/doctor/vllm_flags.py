"""Words of a vLLM command line as argparse takes them, from the table of its flags: values, and what vLLM refuses."""

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import HIDDEN, VALUE, hidden, may_hold_one, safe
from zerodrift.doctor.setting import Origin, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, VllmName, vllm_names, vllm_options

_FLAG = re.compile(r"--?[^\d\s=-][^\s=]*(=.*)?", re.DOTALL)
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_INTEGER = r"\s*[+-]?\d+(_\d+)*\s*"
_SUFFIXED = rf"{_INTEGER}|\d+(\.\d+)?[kmgt]|\d+[KMGT]"  # decimals go with powers of ten alone
_NUMBERS = {
    "integer": _INTEGER,
    "with a suffix": _SUFFIXED,
    "with a suffix, or auto": rf"{_SUFFIXED}|(?i:auto)",
    "decimal or none": r"(None)?|\s*[+-]?(?i:(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf(inity)?)\s*",
}


class Argument(NamedTuple):
    """One flag, and the words it is made of."""

    name: str
    """Without dashes and `no-`, hyphens for underscores, short forms resolved."""
    key: str
    """Behind a dot, as in `--hf-overrides.head_dtype`; otherwise empty."""
    values: tuple[str, ...]
    on: bool
    """False for the `--no-` form of a switch."""
    first: int
    """Index of its first word."""
    last: int
    """Index of its last word; the same where the value is behind a `=`."""
    known: bool
    """Whether its value can be seen from here: a shell, or Hydra, may put something in behind a dollar."""
    refusal: str | None
    """Why vLLM would not start with it."""

    @property
    def value(self) -> str:
        """Its only value, or its last."""
        return self.values[-1] if self.values else ""


class Parsed(NamedTuple):
    """A command line of vLLM, behind its program."""

    arguments: tuple[Argument, ...]
    positionals: tuple[int, ...] = ()
    """Indices of words that belong to no flag; the first is the model."""

    def last(self, name: str | None) -> Argument | None:
        """The one in force: argparse takes the last."""
        return next((each for each in reversed(self.arguments) if each.name == name), None)

    def taken(self) -> "Parsed":
        """Without what vLLM refuses: that is in force nowhere."""
        return self._replace(arguments=tuple(each for each in self.arguments if each.refusal is None))

    def unseen(self, *flags: str | None) -> bool:
        """Whether the value of one of them cannot be seen from here."""
        return any(each.name in flags and not each.known for each in self.arguments)

    def json(self, flag: str | None) -> dict[str, Any] | None:
        """The JSON in force of a flag that takes one; None where it is not given.

        vLLM puts dotted forms together and behind all others, and argparse takes the last: one dotted form undoes
        every whole JSON, and of those the last counts.
        """
        given = [each for each in self.arguments if each.name == flag and each.known]
        dotted = [each for each in given if each.key]
        if dotted:
            return {each.key.partition(".")[0]: _plain(each.value) for each in dotted}
        return _object(given[-1]) if given else None

    def inside(self, spec: VllmName) -> Any:
        """What a JSON says of a setting that has a flag of its own as well; None where it says nothing."""
        return spec.inner and (self.json(spec.inner[0]) or {}).get(spec.inner[1])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(words: Sequence[str], start: int = 0) -> Parsed:
    """The flags in `words` from index `start` on."""
    masks = [None] * start + hidden(words[start:])
    # What may be a piece of a secret is no flag, whatever it looks like.
    plain = [
        HIDDEN if mask == VALUE and word.startswith("-") else word
        for word, mask in zip(words, masks, strict=True)
    ]
    flags = [index for index in range(start, len(plain)) if _FLAG.fullmatch(plain[index])]
    positionals = list(range(start, flags[0] if flags else len(plain)))
    arguments = []
    for first, end in pairwise([*flags, len(plain)]):
        argument = _argument(plain[first:end], first)
        arguments.append(argument)
        positionals += range(argument.last + 1, end)
    return Parsed(tuple(arguments), tuple(positionals))


@cache
def _parser() -> _Parser:
    options = vllm_options()
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    kinds: list[tuple[Iterable[str], dict[str, Any]]] = [
        (options.switches, {"action": argparse.BooleanOptionalAction}),
        ((*options.bare, "help"), {"action": "store_true"}),
        (options.values, {"nargs": "?"}),  # that one is missing is said in our words
        (options.lists, {"nargs": "*"}),
    ]
    for names, how in kinds:
        for name in names:
            others = [alias for alias, meant in options.aliases.items() if meant == name]
            dashed = [f"--{alias}" if "-" in alias else f"-{alias}" for alias in others]
            parser.add_argument(f"--{name}", *dashed, dest=name, **how)
    return parser


def _argument(group: Sequence[str], first: int) -> Argument:
    """The flag that `group` starts with, and as many of the other words as it takes."""
    spelled, equals, behind = group[0].partition("=")
    whole, _, key = spelled.partition(".")
    whole = whole.replace("_", "-")
    refusal: str | None = None
    left: Sequence[str] = ()
    try:
        found, left = _parser().parse_known_args([f"{whole}{equals}{behind}", *group[1:]])
        ((name, value),) = vars(found).items() or [("", None)]
    except ValueError as error:
        name, value, left = whole.lstrip("-"), behind, group[1:] if equals else []
        refusal = f"{whole} takes no value" if may_hold_one(behind) else str(error)
    if not name or (key and name not in vllm_options().values):
        name, value, left = whole.lstrip("-"), True, []
        refusal = _no_such_flag(name)
    if value is None:
        raise ConfigError(f"--{name} stands without its value; write one behind it, or take the flag out")
    last = first + len(group) - len(left) - 1
    values = () if isinstance(value, bool) else (value,) if isinstance(value, str) else tuple(value)
    known = not any("$" in word for word in group[: len(group) - len(left)])
    refusal = refusal or (_bad_value(name, values) if known else None)
    return Argument(name, key, values, value is not False, first, last, known, refusal)


def _object(argument: Argument) -> dict[str, Any]:
    try:
        found = json.loads(argument.value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the value of --{argument.name} is not JSON; quote it for the shell") from error
    if not isinstance(found, dict):
        raise ConfigError(f'--{argument.name} takes a JSON object, as in \'{{"key": "value"}}\'')
    return found


def number(text: str) -> int | float | str:
    """`8k` as vLLM counts it; what is no number stays text."""
    try:
        if text[-1:] in _SCALES:
            return int(float(text[:-1]) * _SCALES[text[-1]])
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def variable_refusal(spec: VllmName, text: str) -> str | None:
    """Why vLLM stops at what a variable says."""
    if spec.kind != "switch" or spec.words or re.fullmatch(_INTEGER, text):
        return None
    return f"{spec.env}={safe(text)} is no number: vLLM takes 1 or 0"


def refused(parsed: Parsed, env: Mapping[str, str], others: Iterable[str | None] = ()) -> Setting:
    """All that stops vLLM, in one line; None where it has nothing against it."""
    variables = [
        variable_refusal(spec, env[spec.env])
        for spec in vllm_names().values()
        if spec.env and "$" not in env.get(spec.env, "$")
    ]
    reasons = [*(each.refusal for each in parsed.arguments), *variables, *others]
    return Setting("refused", "; ".join(dict.fromkeys(filter(None, reasons))) or None, Origin.SET)


def typed(name: str, value: Value) -> str | None:
    """What to type; None where vLLM has no such setting."""
    spec = vllm_names().get(name)
    if spec is None:
        return None
    return written(spec, value) or f"remove {spec.env or f'--{spec.flag}'}"


def written(spec: VllmName, value: Value) -> str | None:
    """Flag or variable, ready to be copied; None where there is nothing to write."""
    if value is None or (spec.kind == "presence" and not value):
        return None
    if spec.env is not None:  # vLLM reads integers
        return f"{spec.env}={int(value) if isinstance(value, bool) else value}"
    if isinstance(value, bool):
        return f"--{spec.flag}" if value else f"--no-{spec.flag}"
    text = str(value) if spec.key is None else json.dumps({spec.key: value}, separators=(",", ":"))
    return f"--{spec.flag} {shlex.quote(text)}"


def _bad_value(name: str, values: Sequence[str]) -> str | None:
    choices, kind = vllm_options().choices.get(name), vllm_options().numbers.get(name)
    for value in values:
        if choices and value not in choices:
            return f"--{name} {safe(value)} is none of {', '.join(choices)}"
        if kind and not re.fullmatch(_NUMBERS[kind], value):
            return f"--{name} {safe(value)} is no number ({kind})"
        if (wanted := _out_of_range(name, value)) is not None:
            return f"--{name} {safe(value)} is out of range: it must be {wanted}"
    return None


def _out_of_range(name: str, value: str) -> str | None:
    """What it must be; a word among numbers, such as `auto`, is in no range."""
    bounds, said = vllm_options().bounds.get(name), number(value)
    return None if bounds is None or isinstance(said, str) else bounds.refusal(said)


def _no_such_flag(name: str) -> str:
    """That vLLM does not have it, and which may have been meant."""
    close = get_close_matches(name, [*vllm_options().names], n=1)
    return (
        f"--{safe(name)} is no flag of vLLM {VLLM_VERSION}{f'; did you mean --{close[0]}?' if close else ''}"
    )


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
