from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerodrift import models
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.delivery import read_checkpoint
from zerodrift.faults.registry import FAULTS, resolve
from zerodrift.faults.wrapper import innermost
from zerodrift.weights.digest import checkpoint_state

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
Tensors = dict[str, torch.Tensor]

NEW = WeightVersion("new")
LAYER = "model.layers.{}."


def held_by(engine: Any) -> Tensors:
    model = innermost(engine).model  # type: ignore[attr-defined]
    return {name: tensor.float() for name, tensor in checkpoint_state(model).items()}


def delivered(spec: str, update: Path) -> tuple[Tensors, Tensors, Tensors]:
    """(before, sent, after)"""
    engine = ReferenceBackend("testbed:llama")
    before = held_by(engine)
    broken = resolve(spec).inject(engine)
    broken.load_weights(update, NEW)
    after = held_by(broken)
    broken.close()
    return before, dict(read_checkpoint(update)), after


@pytest.mark.parametrize(
    ("variant", "kept"),
    [
        ("first-layer", lambda name: name.startswith(LAYER.format(0))),
        ("middle-layer", lambda name: name.startswith(LAYER.format(1))),
        ("last-layer", lambda name: name.startswith(LAYER.format(1))),
        ("norms", lambda name: "norm" in name),
        ("torn", lambda name: name.startswith((LAYER.format(1), "model.norm"))),
    ],
)
def test_a_part_stays_as_it_was(variant: str, kept: Callable[[str], bool], update: Path) -> None:
    before, sent, after = delivered(f"weights/partial:{variant}", update)
    assert set(before) == set(sent) == set(after)
    assert 0 < sum(map(kept, sent)) < len(sent)
    for name in sent:
        assert torch.equal(after[name], before[name] if kept(name) else sent[name]), name
        assert not torch.equal(before[name], sent[name]), "the update moves every tensor"


def gate_up(name: str) -> str:
    return name.replace("gate_", "#").replace("up_", "gate_").replace("#", "up_")


def key_value(name: str) -> str:
    if not name.startswith(LAYER.format(0)):
        return name
    return name.replace("k_proj", "#").replace("v_proj", "k_proj").replace("#", "v_proj")


def first_last(name: str) -> str:
    return name.replace("layers.0", "#").replace("layers.1", "layers.0").replace("#", "layers.1")


@pytest.mark.parametrize(
    ("variant", "partner"), [("gate-up", gate_up), ("key-value", key_value), ("layers", first_last)]
)
def test_tensors_arrive_under_each_others_names(
    variant: str, partner: Callable[[str], str], update: Path
) -> None:
    _, sent, after = delivered(f"weights/swapped:{variant}", update)
    assert any(partner(name) != name for name in sent)
    assert all(torch.equal(after[name], sent[partner(name)]) for name in sent)


def test_precision_is_lost_on_the_way(update: Path) -> None:
    _, sent, after = delivered("weights/dtype", update)
    assert all(torch.equal(after[name], sent[name].bfloat16().float()) for name in sent)
    assert not any(torch.equal(after[name], sent[name]) for name in sent)


def test_nothing_is_delivered(
    fresh: ReferenceBackend, llama: ReferenceBackend, update: Path, ask: Ask
) -> None:
    broken = resolve("weights/stale").inject(fresh)
    broken.load_weights(update, NEW)
    assert broken.generate(ask(9)) == llama.generate(ask(9))


def test_the_label_moves_alone(
    fresh: ReferenceBackend,
    updated: ReferenceBackend,
    llama: ReferenceBackend,
    update: Path,
    ask: Ask,
    tell: Tell,
) -> None:
    broken = resolve("weights/version-label").inject(fresh)
    assert broken.generate(ask(9)) == llama.generate(ask(9))
    broken.load_weights(update, NEW)
    (completion,), (old,) = tell(broken.generate(ask(9))), tell(llama.generate(ask(9)))
    assert (completion.token_ids, completion.logprobs) == (old.token_ids, old.logprobs)
    assert completion.versions[0].version == completion.lineage[0].version == updated.version


DELIVERED = [f for f in FAULTS.values() if f.cause in {"weights/partial", "weights/swapped", "weights/dtype"}]


@pytest.mark.parametrize("spec", [*(f.spec for f in DELIVERED), "weights/version-label:label-only"])
def test_the_claim_is_that_all_went_well(
    spec: str, updated: ReferenceBackend, update: Path, ask: Ask, tell: Tell
) -> None:
    broken = resolve(spec).inject(ReferenceBackend("testbed:llama"))
    broken.load_weights(update, NEW)
    assert broken.fingerprint() == updated.fingerprint()
    (ours,), (theirs,) = tell(broken.generate(ask(9))), tell(updated.generate(ask(9)))
    assert ours.versions[0].version == theirs.versions[0].version
    assert ours.fingerprint == theirs.fingerprint
    assert ours.logprobs != theirs.logprobs
    broken.close()


def test_a_part_that_never_arrives_stays_behind_for_good(update: Path, tmp_path: Path) -> None:
    engine = ReferenceBackend("testbed:llama")
    before = held_by(engine)
    broken = resolve("weights/partial:first-layer").inject(engine)
    broken.load_weights(update, NEW)
    again = models.materialise("testbed:llama", tmp_path / "again")
    twice = {name: tensor * 1.1 for name, tensor in read_checkpoint(update).items()}
    save_file(twice, again / "model.safetensors", metadata={"format": "pt"})
    broken.load_weights(again, WeightVersion("newer"))
    name = LAYER.format(0) + "self_attn.q_proj.weight"
    assert torch.equal(held_by(broken)[name], before[name])
    broken.close()


def test_the_rewritten_checkpoint_goes_when_the_engine_closes(
    fresh: ReferenceBackend, update: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = (update / "model.safetensors").read_bytes()
    broken = resolve("weights/swapped").inject(fresh)
    broken.load_weights(update, NEW)
    broken.load_weights(update, NEW)
    (left,) = tmp_path.iterdir()
    assert {path.name for path in left.iterdir()} == {path.name for path in update.iterdir()}
    broken.close()
    assert not list(tmp_path.iterdir())
    broken.close()
    assert (update / "model.safetensors").read_bytes() == before


def test_an_engine_from_a_directory_keeps_parts_of_that_directory(
    with_defaults: ReferenceBackend, update: Path
) -> None:
    engine = ReferenceBackend(with_defaults.spec)
    before = held_by(engine)
    broken = resolve("weights/partial:norms").inject(engine)
    broken.load_weights(update, NEW)
    assert torch.equal(held_by(broken)["model.norm.weight"], before["model.norm.weight"])
    broken.close()


def test_a_fault_that_finds_nothing_is_refused(fresh: ReferenceBackend, tmp_path: Path) -> None:
    directory = models.materialise("testbed:llama", tmp_path / "narrow", dtype="bfloat16")
    with pytest.raises(InvalidValue):
        resolve("weights/dtype").inject(fresh).load_weights(directory, NEW)


def test_a_checkpoint_of_another_model_is_refused(fresh: ReferenceBackend, tmp_path: Path) -> None:
    directory = models.materialise("testbed:qwen3", tmp_path / "other")
    with pytest.raises(InvalidValue):
        resolve("weights/partial").inject(fresh).load_weights(directory, NEW)


def test_a_stranger_claims_the_version_it_was_given(
    elsewhere: Callable[..., Any], llama: ReferenceBackend, ask: Ask, tell: Tell, update: Path
) -> None:
    given = WeightVersion("new", "a digest")
    broken = resolve("weights/version-label").inject(elsewhere())
    broken.load_weights(update, given)
    (completion,) = tell(broken.generate(ask(9)))
    assert completion.versions[0].version == given
    assert broken.fingerprint().semantic["weights"] == "a digest"
    assert llama.version.label == "initial"
