"""`trl vllm-serve --model MODEL …`: the `vllm serve` that it becomes, which TRL itself advises to type instead."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import msgspec

from zerodrift.core.errors import ConfigError
from zerodrift.core.frozen import freeze
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.tables import TRL_VERSION, VLLM_VERSION, read_table

_PROGRAM = ["trl", "vllm-serve"]
_OFF = ("false", "0", "no")


class TrlServeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table: what TRL renames, and what it adds."""

    env: Mapping[str, str]
    renamed: Mapping[str, str]
    switches: tuple[str, ...]
    imposed: tuple[str, ...]

    def __post_init__(self) -> None:
        """Tables do not change."""
        freeze(self, "env", "renamed")


@cache
def _table() -> TrlServeTable:
    return read_table("settings/trl_serve", TrlServeTable)


class TrlServe(CommandLine):
    """Judged and corrected as the command that it becomes."""

    title = f"trl vllm-serve as TRL {TRL_VERSION} starts it, defaults of vLLM {VLLM_VERSION}"


def find_trl_serve(text: str) -> TrlServe | None:
    """The command that a text is; None where it is another."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # told better by whoever reads commands of vLLM
        return None
    place = next((i for i in range(len(words)) if words[i : i + 2] == _PROGRAM), None)
    if place is None:
        return None
    variables = [f"{name}={value}" for name, value in _table().env.items()]
    model, flags = _split(list(_renamed(words[place + 2 :])))
    said = [*variables, *words[:place], "vllm", "serve", model, *_table().imposed, *flags]
    return TrlServe(shlex.join(said))


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The model, and the rest."""
    if "--config" in words:
        raise ConfigError(
            "trl vllm-serve reads the file behind --config itself; write its keys as flags here"
        )
    if "--model" not in words[:-1]:
        raise ConfigError("trl vllm-serve needs --model MODEL")
    place = words.index("--model")
    return words[place + 1], [*words[:place], *words[place + 2 :]]


def _renamed(words: Sequence[str]) -> Iterator[str]:
    """In vLLM's words: hyphens, its own names, and switches that stand alone."""
    rest = iter(range(len(words)))
    for place in rest:
        name, equals, value = words[place].partition("=")
        if not name.startswith("--"):
            yield words[place]
            continue
        name = name[2:].replace("_", "-")
        name = _table().renamed.get(name, name)
        if name in _table().switches:
            follows = not equals and place + 1 < len(words) and not words[place + 1].startswith("-")
            word = words[next(rest)] if follows else value
            yield f"--no-{name}" if word.lower() in _OFF else f"--{name}"
        elif equals:
            yield from (f"--{name}", value)
        else:
            yield f"--{name}"
