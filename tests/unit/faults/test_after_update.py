from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import the_reference

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
Same = Callable[[Sequence[Completion], Sequence[Completion]], bool]

NEW = WeightVersion("new")
IDS = tuple(range(4, 60))


@pytest.mark.parametrize(
    "spec", ["weights/tied-head", "weights/buffer:rotary-bf16", "weights/buffer:rotary-zero"]
)
def test_nothing_shows_before_the_update(
    spec: str, llama: ReferenceBackend, updated: ReferenceBackend, update: Path, ask: Ask, tell: Tell
) -> None:
    broken = resolve(spec).inject(llama)
    assert broken.score([IDS]) == llama.score([IDS])
    broken.load_weights(update, NEW)
    assert broken.score([IDS]) != updated.score([IDS])
    assert llama.version.label == "initial"
    (completion,) = tell(broken.generate(ask(9)))
    assert completion.versions[0].version == updated.version
    assert broken.fingerprint() == updated.fingerprint()


def test_the_head_stays_behind_for_good(
    llama: ReferenceBackend, updated: ReferenceBackend, update: Path
) -> None:
    broken = resolve("weights/tied-head").inject(llama)
    for _ in range(2):
        broken.load_weights(update, NEW)
        model = the_reference(broken).model
        assert torch.equal(model.get_output_embeddings().weight, llama.model.get_output_embeddings().weight)
        assert torch.equal(model.base_model.embed_tokens.weight, updated.model.base_model.embed_tokens.weight)
        for name, tensor in updated.model.base_model.state_dict().items():
            assert torch.equal(model.base_model.state_dict()[name], tensor), name


def test_rotary_tables_are_left_rounded(llama: ReferenceBackend, update: Path) -> None:
    broken = resolve("weights/buffer:rotary-bf16").inject(llama)
    broken.load_weights(update, NEW)
    table, honest = (m.base_model.rotary_emb.inv_freq for m in (the_reference(broken).model, llama.model))
    assert torch.equal(table, honest.bfloat16().to(honest.dtype))
    assert not torch.equal(table, honest)


def test_one_replica_in_eight_is_stale(
    *,
    fresh: ReferenceBackend,
    llama: ReferenceBackend,
    updated: ReferenceBackend,
    update: Path,
    ask: Ask,
    tell: Tell,
    same: Same,
) -> None:
    broken = resolve("weights/replica").inject(fresh)
    asked = ask(*range(5, 14), max_tokens=3)
    assert same(tell(broken.generate(asked)), tell(llama.generate(asked)))
    broken.load_weights(update, NEW)
    # Nine requests were served: the next nine are turns 9 to 17, and turn 11 falls to the stale one.
    stale = [turn % 8 == 3 for turn in range(9, 18)]
    assert sum(stale) == 1
    old, new = tell(llama.generate(asked)), tell(updated.generate(asked))
    for each, is_stale, before, after in zip(tell(broken.generate(asked)), stale, old, new, strict=True):
        expected = before if is_stale else after
        assert same([each], [expected])
        assert each.versions == after.versions
        assert each.fingerprint == after.fingerprint
    scores = broken.score([IDS] * 8)
    near_old = [scores_of == pytest.approx(llama.score([IDS])[0], abs=1e-4) for scores_of in scores]
    near_new = [scores_of == pytest.approx(updated.score([IDS])[0], abs=1e-4) for scores_of in scores]
    assert (sum(near_old), sum(near_new)) == (1, 7)
