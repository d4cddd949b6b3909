"""The tables in `settings/`: what each setting is called, by people, by vLLM and by trainers, and its default there."""

import operator
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal, TypeVar

import msgspec

from zerodrift.config.document import parse
from zerodrift.core.frozen import freeze
from zerodrift.doctor.setting import Origin, Setting, Settings, Value

VLLM_VERSION = "0.32"
TRL_VERSION = "1.16"
PIPELINERL_VERSION = "58d3934 (June 2026)"
VERL_VERSION = "0.9"
SKYRL_VERSION = "0.3"
OPENRLHF_VERSION = "0.11"

FrameworkName = Literal["trl", "pipelinerl", "verl", "skyrl", "openrlhf", "zerodrift"]
"""Whose files, or launch lines, have a table of keys."""

UNWRITTEN = "unknown"
"""A default that depends on the model or the device."""

Table = TypeVar("Table")


Number = Literal["integer", "with a suffix", "with a suffix, or auto", "decimal or none"]


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What people call a setting, and what to say where nothing is wrong with it."""

    title: str
    fine: str


class VllmName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What vLLM calls a setting."""

    flag: str | None = None
    """Without its dashes."""
    key: str | None = None
    """Inside the JSON that the flag takes."""
    except_: str | None = msgspec.field(default=None, name="except")
    """A key of that JSON that is a setting of its own."""
    inside: str | None = None
    """Flag and key of a JSON that may say it instead: never both."""
    env: str | None = None
    also: tuple[str, ...] = ()
    """Flags that have the same effect."""
    kind: Literal["text", "number", "switch", "presence", "names", "secret"] = "text"
    """`presence`: on if given at all; `names`: the keys of its JSON; `secret`: whether there is one."""
    words: bool = False
    """A variable that is on if it says `1` or `true`, and otherwise off; vLLM reads the other switches as integers."""
    secret_env: str | None = None
    default: Value = None
    cpu: Value | msgspec.UnsetType = msgspec.UNSET
    """The default on CPU, where it is another."""
    only: Literal["cpu", "written"] | None = None
    """The device that it means something on, or where somebody wrote it."""
    server: str | None = None
    """Path in the configuration that /server_info shows."""
    metric: str | None = None
    """Label of vllm:cache_config_info in /metrics."""

    @property
    def inner(self) -> tuple[str, str] | None:
        """That flag and that key."""
        flag, _, key = (self.inside or "").partition(".")
        return (flag, key) if key else None

    def default_on(self, device: Value) -> Value:
        """The default there."""
        return self.default if device != "cpu" or self.cpu is msgspec.UNSET else self.cpu


class FileName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer's file calls a setting: a path of keys, and the default where the file does not say."""

    path: str
    default: Value = None
    values: Mapping[str, Value] = {}
    """Words of the file to words of ours, where they differ."""

    def __post_init__(self) -> None:
        """Tables do not change."""
        freeze(self, "values")


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that vLLM takes behind a flag."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    never: float | None = None

    def refusal(self, number: float) -> str | None:
        """What it should be, where it is not."""
        for limit, holds, words in (
            (self.ge, operator.ge, "at least"),
            (self.gt, operator.gt, "above"),
            (self.le, operator.le, "at most"),
            (self.lt, operator.lt, "below"),
            (self.never, operator.ne, "not"),
        ):
            if limit is not None and not holds(number, limit):
                return f"{words} {limit:g}"
        return None


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many words each flag of vLLM takes, and which."""

    switches: tuple[str, ...]
    bare: tuple[str, ...]
    values: tuple[str, ...]
    lists: tuple[str, ...]
    aliases: Mapping[str, str]
    choices: Mapping[str, tuple[str, ...]]
    numbers: Mapping[str, Number]
    bounds: Mapping[str, Bounds]

    def __post_init__(self) -> None:
        """Tables do not change."""
        freeze(self, "aliases", "choices", "numbers", "bounds")

    @property
    def names(self) -> frozenset[str]:
        """All of them, without `--no-` forms and aliases."""
        return frozenset((*self.switches, *self.bare, *self.values, *self.lists))


class VllmRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another vLLM differs from the one whose table we have."""

    defaults: Mapping[str, Value]
    """Of settings whose default has changed between versions: those that are known of this one."""
    lacks: tuple[str, ...]
    """Flags that are judged, and that it does not have."""

    def __post_init__(self) -> None:
        """Tables do not change."""
        freeze(self, "defaults")


def read_table(name: str, shape: type[Table]) -> Table:
    """A file of ours, below this package."""
    text = (files("zerodrift.doctor") / f"{name}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(parse(text, f"{name}.yaml"), shape)


@cache
def names() -> Mapping[str, Name]:
    """Every setting, in the order in which it is shown."""
    return read_table("settings/names", dict[str, Name])


@cache
def vllm_names() -> Mapping[str, VllmName]:
    """Those that vLLM has."""
    return read_table("settings/vllm", dict[str, VllmName])


@cache
def vllm_options() -> Options:
    """Every flag of vLLM."""
    return read_table("settings/vllm_options", Options)


@cache
def trl_keys() -> tuple[str, ...]:
    """Every key of a TRL file, judged or not."""
    return read_table("settings/trl_keys", tuple[str, ...])


@cache
def vllm_releases() -> Mapping[str, VllmRelease]:
    """Other versions that were asked, as `0.18`."""
    return read_table("settings/vllm_versions", dict[str, VllmRelease])


@cache
def file_names(framework: FrameworkName) -> Mapping[str, FileName]:
    """Those that a file of this framework has."""
    return read_table(f"settings/{framework}", dict[str, FileName])


@cache
def framework_settings(framework: Literal["trl", "pipelinerl", "openrlhf"]) -> Settings:
    """What it sets by itself in the vLLM that it starts."""
    table = read_table("settings/frameworks", dict[str, dict[Origin, dict[str, Value]]])[framework]
    return {
        name: Setting(name, value, origin)
        for origin, values in table.items()
        for name, value in values.items()
    }
