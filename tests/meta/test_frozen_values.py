"""A frozen struct whose dict can be changed is not frozen: every one that holds a mapping is looked at here."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest

import zerodrift
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.frozen import FrozenDict, FrozenFacts
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.preflight import Item, Status
from zerodrift.records.verdict import Outcome, ProbeRecord

NEEDS_A_GPU = "zerodrift.exact.ops.triton."


def structs() -> Iterator[type[msgspec.Struct]]:
    """Every frozen struct of the package."""
    for module in pkgutil.walk_packages(zerodrift.__path__, "zerodrift."):
        if module.name.startswith(NEEDS_A_GPU):
            continue
        for value in vars(import_module(module.name)).values():
            here = isinstance(value, type) and value.__module__ == module.name
            if here and issubclass(value, msgspec.Struct) and value.__struct_config__.frozen:
                yield value


def holds(kind: type, *types: type[msgspec.inspect.Type]) -> list[str]:
    """Names of the fields of `kind` that hold one of `types`, at any depth."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return [field.name for field in info.fields if any(isinstance(part, types) for part in parts(field.type))]


def parts(kind: Any) -> Iterator[msgspec.inspect.Type]:
    yield kind
    if not isinstance(kind, msgspec.inspect.StructType):  # it is looked at by itself
        for below in msgspec.structs.asdict(kind).values():
            for each in below if isinstance(below, tuple) else (below,):
                if isinstance(each, msgspec.inspect.Type):
                    yield from parts(each)


def test_no_frozen_struct_holds_a_list_or_a_set() -> None:
    found = {
        kind: names
        for kind in structs()
        if (names := holds(kind, msgspec.inspect.ListType, msgspec.inspect.SetType))
    }
    assert not found


def thawed(kind: type) -> list[str]:
    """Fields with a mapping that `kind` does not freeze when it is built."""
    if issubclass(kind, FrozenFacts) and kind.__post_init__ is FrozenFacts.__post_init__:
        return []
    built = getattr(kind, "__post_init__", None)
    source = inspect.getsource(built) if built else ""
    frozen = source.partition("freeze(self")[2].partition(")")[0]
    return [name for name in holds(kind, msgspec.inspect.DictType) if f'"{name}"' not in frozen]


def test_every_mapping_in_a_frozen_struct_is_frozen() -> None:
    assert not {kind: names for kind in structs() if (names := thawed(kind))}


@pytest.mark.parametrize(
    ("built", "name"),
    [
        (SamplingParams(logit_bias={1: 1.0}), "logit_bias"),
        (EngineFingerprint(engine="x", semantic={"a": "1"}, numeric={}, deployment={}), "semantic"),
        (Item(name="audit", status=Status.PASS, message="s", facts={"mean": 1.0}), "facts"),
        (
            ProbeRecord(name="p", status=Outcome.PASS, required=True, message="s", evidence={"z": 1.0}),
            "evidence",
        ),
    ],
)
def test_it_is_frozen_in_values_that_were_built_and_that_were_read(built: msgspec.Struct, name: str) -> None:
    read = msgspec.json.decode(msgspec.json.encode(built), type=type(built))
    assert read == built
    assert type(getattr(built, name)) is type(getattr(read, name)) is FrozenDict


def test_a_planted_list_and_a_planted_dict_are_seen() -> None:
    class Planted(msgspec.Struct, frozen=True):
        fine: tuple[int, ...]
        names: tuple[list[str], ...]
        facts: dict[str, int] | None = None

    assert holds(Planted, msgspec.inspect.ListType) == ["names"]
    assert thawed(Planted) == ["facts"]


def test_a_default_cannot_be_changed_for_everybody() -> None:
    bias: Any = Request(Prompt((1,))).sampling.logit_bias
    with pytest.raises(TypeError, match="frozen"):
        bias[5] = 1e9
    assert Request(Prompt((1,))).sampling.logit_bias == {}


def test_parameters_can_be_counted_by() -> None:
    assert (
        len({SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={1: 2.0}), SamplingParams()}) == 2
    )
