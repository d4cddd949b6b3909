"""From words of a vLLM command line to flags with their values, as its own parser would take them apart."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import reduce
from typing import Any, NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.tables import VLLM_VERSION, Options, vllm_options

_NUMBER = re.compile(r"-\d")
_LEVEL = re.compile(r"-O=?(.+)")
_LETTERS = ("n", "q", "r")
SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
    positionals: tuple[int, ...]
    """Indices of words that belong to no flag; the first is the model."""

    def last(self, name: str) -> Argument | None:
        """The one in force: argparse takes the last."""
        return next((each for each in reversed(self.arguments) if each.name == name), None)

    def unknown(self) -> list[str]:
        """Flags that vLLM does not have, each with the one that may have been meant."""
        options = vllm_options().names
        return [hint(each.name) for each in self.arguments if each.name not in options]


def parse(words: Sequence[str], start: int = 0) -> Parsed:
    """The flags in `words` from index `start` on."""
    options = vllm_options()
    arguments: list[Argument] = []
    positionals: list[int] = []
    index = start
    while index < len(words):
        if not _is_flag(words[index]):
            positionals.append(index)
            index += 1
            continue
        argument = _argument(words, index, options)
        arguments.append(argument)
        index = argument.last + 1
    return Parsed(tuple(arguments), tuple(positionals))


def number(text: str) -> int | float | str:
    """`8k` as vLLM counts it; what is no number stays text."""
    try:
        if text[-1:] in SCALES:
            return int(float(text[:-1]) * SCALES[text[-1]])
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


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
        raise ConfigError(
            f"the value of --{argument.name} is not JSON ({error}); quote it for the shell"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f'--{argument.name} takes a JSON object, as in \'{{"key": "value"}}\'')
    return found


def in_force(arguments: Sequence[Argument]) -> dict[str, Any]:
    """The JSON of a flag that was given more than once.

    vLLM puts dotted forms together and behind all others, and argparse takes the last: one dotted form undoes every
    whole JSON, and of those the last counts.
    """
    whole = [mapping(argument) for argument in arguments if not argument.key]
    dotted = [mapping(argument) for argument in arguments if argument.key]
    if not dotted:
        return whole[-1]
    return reduce(merged, dotted)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with dictionaries put together at every depth; of all else what is `above` counts."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            found[key] = merged(inner, value)
        else:
            found[key] = value
    return found


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


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
    if spelled.startswith("--"):
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
    return bare, False, tuple(found)


def hint(name: str) -> str:
    """That there is no such flag, and which may have been meant."""
    close = get_close_matches(name, vllm_options().names, n=1)
    meant = f"; did you mean --{close[0]}?" if close else ""
    return f"--{name} is no flag of vLLM {VLLM_VERSION}{meant}"
