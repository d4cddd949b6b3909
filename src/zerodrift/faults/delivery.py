"""Faults on the way of new weights to the engine: what arrives is not what was sent, and nobody says so.

The checkpoint is rewritten in a directory of our own, which is the engine's to read until the next update or until
`close`. The claim that the update arrived whole is kept up everywhere: label, digest and fingerprint.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.core.completion import Answer, Completion, EngineFingerprint
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Request
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.faults.rewriting import rewrite
from zerodrift.faults.wrapper import FaultyBackend, Plant, innermost
from zerodrift.models.directory import WEIGHTS, read_config, weight_files
from zerodrift.models.family.base import Family
from zerodrift.models.family.registry import family_named
from zerodrift.models.spec import builtin_name

Tensors = Mapping[str, torch.Tensor]
Transit = Callable[[Family, Tensors, Tensors], Tensors]
"""(whose names they have, what the engine holds, what is sent) to what arrives."""


class Claiming(FaultyBackend):
    """Says that it runs the version it was last given."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._claimed: WeightVersion | None = None

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """The label moves, and nothing else does."""
        self._claim(directory, version)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Every token is said to come from the claimed version."""
        answers = self.inner.generate(requests)
        return answers if self._claimed is None else rewrite(requests, answers, self._relabelled)

    def fingerprint(self) -> EngineFingerprint:
        """With the claimed digest, where the engine shows one."""
        facts = self.inner.fingerprint()
        if self._claimed is None or "weights" not in facts.semantic:
            return facts
        claimed = {**facts.semantic, "weights": self._claimed.digest or "unknown"}
        return msgspec.structs.replace(facts, semantic=claimed)

    def _claim(self, directory: Path, version: WeightVersion) -> None:
        """The version that a sound engine would show after loading `directory`."""
        engine = innermost(self.inner)
        if isinstance(engine, ReferenceBackend):
            dtype = str(engine.model.dtype).removeprefix("torch.")
            version = WeightVersion(version.label, load_reference(directory, dtype).digest)
        self._claimed = version

    def _relabelled(self, _: Request, completion: Completion) -> Completion:
        assert self._claimed is not None, "relabelled before anything was claimed"
        total = len(completion.sequence) - 1
        return msgspec.structs.replace(
            completion,
            versions=(VersionSpan(self._claimed, 0, len(completion.token_ids)),),
            lineage=(LineageSegment(self._claimed, 0, total),) if completion.lineage else (),
            fingerprint=self.fingerprint().digest,
        )


class LostUpdate(FaultyBackend):
    """Takes an update, and does nothing with it."""

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Not even the label moves."""


class Altered(Claiming):
    """Delivers a rewritten checkpoint."""

    def __init__(self, inner: Backend, transit: Transit, *, keeps: bool = False) -> None:
        """`keeps` says that `transit` looks at what the engine holds, which is then read from its checkpoint."""
        super().__init__(inner)
        self._transit = transit
        self._held: Tensors = _held_by(inner) if keeps else {}
        self._rewritten: tempfile.TemporaryDirectory[str] | None = None

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Whatever the fault makes of `directory`, under the version that was asked for."""
        sent = read_checkpoint(directory)
        arrived = self._transit(family_named(read_config(directory)["model_type"]), self._held, sent)
        if all(arrived[name] is sent[name] for name in sent):
            raise InvalidValue(f"the fault finds nothing to change in {directory}; it needs another model")
        self._clean()
        self._rewritten = tempfile.TemporaryDirectory(prefix="zerodrift-fault-")
        target = Path(self._rewritten.name)
        _write_checkpoint(directory, arrived, target)
        self.inner.load_weights(target, version)
        self._held = arrived if self._held else {}
        self._claim(directory, version)

    def close(self) -> None:
        """The rewritten checkpoint goes with the engine."""
        super().close()
        self._clean()

    def _clean(self) -> None:
        if self._rewritten is not None:
            self._rewritten.cleanup()
            self._rewritten = None


def read_checkpoint(directory: Path) -> Tensors:
    """Every tensor of a checkpoint directory, by name."""
    return {name: tensor for path in weight_files(directory) for name, tensor in load_file(path).items()}


def _write_checkpoint(source: Path, tensors: Tensors, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, target / WEIGHTS, metadata={"format": "pt"})


def _held_by(engine: Backend) -> Tensors:
    spec: str | Path = getattr(innermost(engine), "spec", "")
    if builtin_name(spec) is None:
        return read_checkpoint(Path(spec))
    with tempfile.TemporaryDirectory(prefix="zerodrift-fault-") as scratch:
        return read_checkpoint(models.materialise(spec, scratch))


def _layer_count(family: Family, names: Tensors) -> int:
    return 1 + max((layer for name in names if (layer := family.layer_of(name)) is not None), default=-1)


def _keeping(kept: Callable[[Family, str, int], bool]) -> Transit:
    """Tensors for which `kept(family, name, number of layers)` holds stay as the engine has them."""

    def transit(family: Family, held: Tensors, sent: Tensors) -> Tensors:
        if set(held) != set(sent):
            raise InvalidValue(
                f"the update has {len(sent)} tensors of other names than the {len(held)} that the engine started "
                "with; send a checkpoint of the same model"
            )
        count = _layer_count(family, sent)
        return {name: held[name] if kept(family, name, count) else tensor for name, tensor in sent.items()}

    return transit


def _keeping_layer(place: Callable[[int], int]) -> Transit:
    return _keeping(lambda family, name, count: family.layer_of(name) == place(count))


def _after_the_middle(family: Family, name: str, count: int) -> bool:
    layer = family.layer_of(name)
    return not family.is_embedding(name) if layer is None else layer >= count / 2


def _keeping_rows(which: Callable[[Family, Tensors], str], first: float, last: float) -> Transit:
    """Of one tensor, rows from one share of their number to another stay as the engine has them."""

    def transit(family: Family, held: Tensors, sent: Tensors) -> Tensors:
        name = which(family, sent)
        if name not in sent:
            return sent
        rows = slice(int(first * len(sent[name])), int(last * len(sent[name])))
        mixed = sent[name].clone()
        mixed[rows] = held[name][rows]
        return {**sent, name: mixed}

    return transit


def _head(family: Family, sent: Tensors) -> str:
    """The head, or the embedding where the two are one: outside the layers no other matrix is."""
    outside = [name for name, each in sent.items() if family.layer_of(name) is None and each.dim() > 1]
    return next((name for name in outside if not family.is_embedding(name)), outside[0])


def _query(family: Family, sent: Tensors) -> str:
    """Of the first layer."""
    place = "" if family.attention is None else family.attention.projections.get("q", "")
    return next((name for name in sent if _is_of(family, name, 0, place)), "")


def _down_of_the_last(family: Family, name: str, count: int) -> bool:
    place = "" if family.mlp is None else family.mlp.projections.get("down", "")
    return _is_of(family, name, count - 1, place)


def _is_of(family: Family, name: str, layer: int, place: str) -> bool:
    return bool(place) and family.layer_of(name) == layer and name.endswith(f".{place}.weight")


def _times(factor: float) -> Transit:
    """What is held afterwards has gone `factor` times the way from the old weights to the new ones."""

    def transit(_: Family, held: Tensors, sent: Tensors) -> Tensors:
        return {name: held[name] + factor * (tensor - held[name]) for name, tensor in sent.items()}

    return transit


def _exchanging(partner: Callable[[Family, str, int], str]) -> Transit:
    """Each tensor arrives under the name of its partner; `partner(family, name, number of layers)` may be itself."""

    def transit(family: Family, _: Tensors, sent: Tensors) -> Tensors:
        count = _layer_count(family, sent)
        return {name: sent[partner(family, name, count)] for name in sent}

    return transit


def _gate_and_up(family: Family, name: str, _: int) -> str:
    return _with_other_role(name, {} if family.mlp is None else family.mlp.projections, "gate", "up")


def _key_and_value(family: Family, name: str, _: int) -> str:
    places = {} if family.attention is None else family.attention.projections
    return _with_other_role(name, places, "k", "v") if family.layer_of(name) == 0 else name


def _with_other_role(name: str, places: Mapping[str, str], one: str, other: str) -> str:
    """The same tensor of the other projection; `name` itself where it is neither, or they are no tensors of their own."""
    if one not in places or other not in places:
        return name
    pair = {places[one]: places[other], places[other]: places[one]}
    return ".".join(pair.get(part, part) for part in name.split("."))


def _first_and_last_layer(family: Family, name: str, count: int) -> str:
    ends = {0: count - 1, count - 1: 0}
    layer = family.layer_of(name)
    return name if layer not in ends else family.in_layer(name, ends[layer])


def _through_bf16(_family: Family, _held: Tensors, sent: Tensors) -> Tensors:
    return {name: tensor.to(torch.bfloat16).to(tensor.dtype) for name, tensor in sent.items()}


def _kept(transit: Transit) -> Callable[[Backend], Backend]:
    return lambda engine: Altered(engine, transit, keeps=True)


def _sent(transit: Transit) -> Callable[[Backend], Backend]:
    return lambda engine: Altered(engine, transit)


DELIVERY_FAULTS: Mapping[str, Plant] = {
    "weights/stale:nothing": LostUpdate,
    "weights/version-label:label-only": Claiming,
    "weights/partial:middle-layer": _kept(_keeping_layer(lambda count: count // 2)),
    "weights/partial:first-layer": _kept(_keeping_layer(lambda count: 0)),
    "weights/partial:last-layer": _kept(_keeping_layer(lambda count: count - 1)),
    "weights/partial:norms": _kept(_keeping(lambda family, name, count: family.is_norm(name))),
    "weights/partial:torn": _kept(_keeping(_after_the_middle)),
    "weights/partial:one-matrix": _kept(_keeping(_down_of_the_last)),
    "weights/rows:upper-half-of-the-head": _kept(_keeping_rows(_head, 0.5, 1.0)),
    "weights/rows:some-queries": _kept(_keeping_rows(_query, 0.25, 0.625)),
    "weights/fraction:83-percent": _kept(_times(0.83)),
    "weights/multiple:twice": _kept(_times(2.0)),
    "weights/multiple:1.4-times": _kept(_times(1.4)),
    "weights/swapped:gate-up": _sent(_exchanging(_gate_and_up)),
    "weights/swapped:key-value": _sent(_exchanging(_key_and_value)),
    "weights/swapped:layers": _sent(_exchanging(_first_and_last_layer)),
    "weights/dtype:bf16": _sent(_through_bf16),
}
