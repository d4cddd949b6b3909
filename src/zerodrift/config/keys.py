"""Does every key of a configuration mean something? One that does not is refused, with the one that was meant."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeGuard

import msgspec

from zerodrift.core.errors import ConfigError, RetiredKey, UnknownKey

RETIRED: Mapping[str, str] = {
    "use_v2_block_manager": (
        "vLLM removed its first block manager in 2024 and the switch with it, so it would change nothing: "
        "delete the line; block_size and gpu_memory_utilization are what is left to choose"
    ),
    "swap_space": (
        "it sized the CPU swap of vLLM's V0 engine; V1 recomputes preempted sequences instead, and vLLM 0.18 "
        "dropped the option: delete the line, and raise gpu_memory_utilization or lower max_num_seqs against "
        "preemption"
    ),
}


class Field(NamedTuple):
    """One key that exists: where, and of which type."""

    path: str
    kind: Any


def check_keys(values: Mapping[Any, Any], root: type[msgspec.Struct], source: str) -> None:
    """Every key of `values` is a field of `root` or of its sections; `source` says where they were written."""
    known = {field.path: field for field in fields(root)}
    _check(values, known, source, "")


def fields(section: type[msgspec.Struct], prefix: str = "") -> Iterator[Field]:
    """Every key of `section` and of the sections in it, outermost first."""
    for field in msgspec.structs.fields(section):
        path = f"{prefix}{field.name}"
        yield Field(path, field.type)
        if is_section(field.type):
            yield from fields(field.type, f"{path}.")


def is_section(kind: object) -> TypeGuard[type[msgspec.Struct]]:
    """Whether a field of this type holds keys of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _check(values: Mapping[Any, Any], known: Mapping[str, Field], source: str, prefix: str) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        # A key with a dot in it ("engine.name": …) is a path only in --set.
        if path not in known or not isinstance(key, str) or "." in key:
            raise _refusal(key, list(known), source, prefix)
        if is_section(known[path].kind):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{source}: {path} is {value!r}, but it is a section: give it keys, or leave it out "
                    "for defaults"
                )
            _check(value, known, source, f"{path}.")


def _refusal(key: object, known: list[str], source: str, prefix: str) -> ConfigError:
    where = f"section {prefix[:-1]!r}" if prefix else "the top level"
    if key in RETIRED:
        return RetiredKey(f"{source}: {key!r} in {where} is a key of engines past: {RETIRED[str(key)]}")
    depth = len(prefix)
    siblings = [path[depth:] for path in known if path.startswith(prefix) and "." not in path[depth:]]
    # The same name in another section is a better guess than a similar one in this.
    meant = [path for path in known if path.rpartition(".")[2] == key]
    meant = meant or [f"{prefix}{name}" for name in get_close_matches(str(key), siblings, n=1)]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"its keys are {', '.join(siblings)}"
    return UnknownKey(f"{source}: {where} has no key {key!r}; {hint}")
