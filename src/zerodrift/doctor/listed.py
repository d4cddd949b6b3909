"""What in a command, or in a file of vLLM's flags, is known not to be a secret? What the tables know; the rest is left out.

No rule knows every name of a secret. The flags of vLLM are all in a table, and so are the variables that are judged:
a value under any other name may be anything.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from zerodrift.doctor.secrets import PROGRAMS, WORD, variable
from zerodrift.doctor.tables import vllm_names, vllm_options

READ_TOO = frozenset(["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"])
"""Variables that are judged together with others."""
_MANY = 10**6
_LAUNCHERS = {
    **dict.fromkeys(("d", "e", "env", "i", "init", "it", "privileged", "rm", "t"), 0),
    **dict.fromkeys(("gpus", "gres", "ipc", "m", "name", "net", "network", "runtime", "shm-size"), 1),
    **dict.fromkeys(("cpunodebind", "membind", "n", "N", "nodes", "ntasks", "v", "volume"), 1),
}
"""Flags of programs that start vLLM, and how many words each takes."""
_VARIABLE_FLAGS = ("e", "env")
_ENVIRONMENTS = ("env", "environment", "env_vars")
_ATTACHED = re.compile(r"[nr]\d+|q[a-z0-9]+|O\d")
"""Short flags of vLLM with the value behind them, as compilers have it."""
_HARMLESS = re.compile(r"-\d.*|\d+(?::\d+)+(?:/\w+)?")
"""A negative number, or ports."""


@cache
def variables() -> frozenset[str]:
    """Those whose values may be shown."""
    return READ_TOO | {spec.env for spec in vllm_names().values() if spec.env}


@cache
def names() -> frozenset[str]:
    """All that the tables know, with underscores."""
    return variables() | {name.replace("-", "_") for name in _takes()}


def is_flag(name: str) -> bool:
    """Whether vLLM has it, whole or by its first letters, with hyphens or underscores, with a key behind a dot or not."""
    return _taken("--", name, _takes()) is not None


def unlisted(words: Sequence[str], behind: int = 0) -> Iterator[str | None]:
    """For each word what to write in its place; None where it may stay. From index `behind` on flags are vLLM's.

    What follows an unknown flag is its value up to the next flag, for quotes may be missing; so is one word behind an
    unknown variable, unless it is a program.
    """
    owner, left, room = "", 0, 0
    before = ""
    for index, word in enumerate(words):
        match = WORD.fullmatch(word)
        dashes, name, value = match.groups() if match else ("", "", None)
        mask = None
        if dashes:
            takes = _taken(dashes, name, _takes() if index >= behind else _LAUNCHERS)
            owner, left, room = ("", 0, takes) if takes is not None else (name, _MANY, 0)
            mask = _flag(dashes, name, value, known=takes is not None)
            room = room if value is None else 0
        elif index == behind - 1 or word == "--" or (not room and word.rpartition("/")[2] in PROGRAMS):
            owner, left, room = "", 0, 0
        elif word.startswith("-") and not _HARMLESS.fullmatch(word):
            mask = '"$VALUE"'
        elif value is not None and not room and name in variables():
            left = 0
        elif value is not None and not room and not left:
            mask = _assigned("", name)
            owner, left = name, 0 if before.lstrip("-") in _VARIABLE_FLAGS else 1
        elif left and not _HARMLESS.fullmatch(word):
            mask, left = f'"${variable(owner)}"', left - 1
        else:
            room = max(room - 1, 0)
        before = word
        yield mask


def unlisted_in_a_tree(path: tuple[str, ...], tree: Any) -> Iterable[Any]:
    """Of variables and of words with flags among them, wherever they stand in a YAML file."""
    if isinstance(tree, dict):
        return [key for key in tree if path[-1:] and path[-1] in _ENVIRONMENTS and key not in variables()]
    words = [each if isinstance(each, str) else "" for each in tree]
    if not any(word.startswith("-") for word in words) and path[-1:] not in [
        (each,) for each in _ENVIRONMENTS
    ]:
        return []
    return [index for index, mask in enumerate(unlisted(words)) if mask is not None]


def unlisted_in_flags(path: tuple[str, ...], tree: Any) -> Iterable[Any]:
    """The same, and at the top of a file every key that is no flag of vLLM."""
    if path or not isinstance(tree, dict):
        return unlisted_in_a_tree(path, tree)
    return [key for key in tree if not is_flag(str(key))]


@cache
def _takes() -> dict[str, int]:
    """How many words each flag of vLLM takes."""
    options = vllm_options()
    number = {
        **dict.fromkeys((*options.switches, *options.bare, "help"), 0),
        **dict.fromkeys(options.values, 1),
        **dict.fromkeys(options.lists, _MANY),
    }
    return {spelled: number[name] for spelled, name in (*options.long.items(), *options.short.items())} | {
        "O": 1
    }


def _taken(dashes: str, name: str, table: dict[str, int]) -> int | None:
    whole, _, key = name.partition(".")
    whole = whole.replace("_", "-")
    if whole in table:
        return 1 if key else table[whole]
    if dashes == "-":
        return 0 if table is not _LAUNCHERS and _ATTACHED.fullmatch(whole) else None
    return max((number for each, number in table.items() if each.startswith(whole)), default=None)


def _flag(dashes: str, name: str, value: str | None, *, known: bool) -> str | None:
    if name in _VARIABLE_FLAGS and value is not None:
        inner, equals, _ = value.partition("=")
        return _assigned(f"{dashes}{name}=", inner) if equals and inner not in variables() else None
    if known:
        return None
    if value is not None:
        return _assigned(dashes, name)
    attached = dashes == "-" and may_be_attached(name)
    return f'-{name[0]}"${variable(name[0])}"' if attached else None


def may_be_attached(name: str) -> bool:
    """Whether a value may hang on a short flag: `-pNAME`, unless it is a long one with a dash too few."""
    return len(name) > 2 and name.replace("_", "-") not in _takes()


def _assigned(before: str, name: str) -> str:
    return f'{before}{name}="${variable(name)}"'
