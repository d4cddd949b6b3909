"""A frozen struct whose dict can be changed is not frozen: every one that holds a mapping is looked at here."""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest

import zerodrift
from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.backends.sglang import STREAMING
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.cli.env import Environment, collect
from zerodrift.config.engine import EngineConfig
from zerodrift.core.cause import Cause
from zerodrift.core.completion import EngineFingerprint, LogprobKind
from zerodrift.core.errors import InvalidValue
from zerodrift.core.frozen import FrozenDict
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.doctor.rule import Rule, Severity, Test
from zerodrift.doctor.tables import FileName, Options
from zerodrift.engine.output import Identity, Output, refused
from zerodrift.models.family.base import AttentionPlaces, MlpPlaces
from zerodrift.models.model_facts import ModelFacts, facts
from zerodrift.records.preflight import Item, Status
from zerodrift.records.verdict import Outcome, ProbeRecord, VerdictRecord
from zerodrift.weights.manifest import ManifestDiff

NEEDS_A_GPU = "zerodrift.exact.ops.triton."
FINGERPRINT = EngineFingerprint(engine="x", semantic={"a": "1"}, numeric={}, deployment={})
IDENTITY = Identity(kind=LogprobKind.PROCESSED, fingerprint="f", numeric={"isa": "avx2"})
# How each struct with a mapping is built, the mappings plain dicts.
EXAMPLES: dict[type[msgspec.Struct], Callable[[], msgspec.Struct]] = {
    Explanation: lambda: Explanation(sampling={"top_p": 0.9}, bias={1: 1.0}),
    AttentionPlaces: lambda: AttentionPlaces(norms={"q": "q_norm"}),
    MlpPlaces: MlpPlaces,
    Cause: lambda: Cause("path/rope", "Positions.", {"*": "fix"}),
    EngineConfig: lambda: EngineConfig(env={"A": "1"}),
    EngineFingerprint: lambda: FINGERPRINT,
    FileName: lambda: FileName("a.b", values={"true": "on"}),
    Identity: lambda: IDENTITY,
    Options: lambda: Options((), (), (), (), {"tp": "x"}, choices={"x": ("1",)}, numbers={"x": "integer"}),
    Output: lambda: refused("r", Prompt((1,)), SamplingParams(), IDENTITY, InvalidValue("no")),
    Environment: lambda: collect(None),
    Item: lambda: Item(name="audit", status=Status.PASS, says="s", facts={"mean": 1.0}),
    ManifestDiff: lambda: ManifestDiff((), (), {"w": "content"}),
    ModelFacts: lambda: msgspec.structs.replace(
        facts("testbed:llama"), generation_defaults={"temperature": 0.5}
    ),
    ProbeRecord: lambda: ProbeRecord(
        name="p", status=Outcome.PASS, required=True, says="s", evidence={"z": 1.0}
    ),
    Rule: lambda: Rule(
        id="r", setting="s", when={"s": Test(is_=1)}, severity=Severity.NOTE, message="S.", source=(), do="d"
    ),
    SamplingParams: lambda: SamplingParams(logit_bias={1: 1.0}),
    Streaming: lambda: STREAMING,
    VerdictRecord: lambda: VerdictRecord(
        verdict=Outcome.PASS,
        guilty="none",
        says="s",
        engine=FINGERPRINT,
        reference=FINGERPRINT,
        model="m",
        precision="fp32",
        floor={"mean": 1.0},
        metrics={},
        gates={},
    ),
}


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


def test_every_struct_with_a_mapping_has_an_example() -> None:
    assert {kind for kind in structs() if holds(kind, msgspec.inspect.DictType)} == set(EXAMPLES)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_mapping_in_a_frozen_struct_is_frozen(kind: type[msgspec.Struct]) -> None:
    built = EXAMPLES[kind]()
    read = msgspec.json.decode(msgspec.json.encode(built), type=kind)
    assert read == built
    for value in (built, read):
        for name in holds(kind, msgspec.inspect.DictType):
            assert type(getattr(value, name)) is FrozenDict, name


def test_a_planted_list_and_a_planted_dict_are_seen() -> None:
    class Planted(msgspec.Struct, frozen=True):
        fine: tuple[int, ...]
        names: tuple[list[str], ...]
        facts: dict[str, int] | None = None

    assert holds(Planted, msgspec.inspect.ListType) == ["names"]
    assert holds(Planted, msgspec.inspect.DictType) == ["facts"]


def test_a_default_cannot_be_changed_for_everybody() -> None:
    bias: Any = Request(Prompt((1,))).sampling.logit_bias
    with pytest.raises(TypeError, match="frozen"):
        bias[5] = 1e9
    assert Request(Prompt((1,))).sampling.logit_bias == {}


def test_parameters_can_be_counted_by() -> None:
    assert (
        len({SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={1: 2.0}), SamplingParams()}) == 2
    )
