"""Faults inside the model: what an audit's name for them does not already hold them to."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.faults.support import ask, by

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.precision import _body_in, _LossyCache
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import the_reference

IDS = tuple((31 * place) % 500 + 4 for place in range(150))


def errors(spec: str, engine: ReferenceBackend) -> npt.NDArray[np.float64]:
    """Difference of the score of tokens 1…, by position."""
    broken, honest = resolve(spec).inject(engine).score([IDS])[0], engine.score([IDS])[0]
    return np.abs(np.subtract(broken, honest, dtype=np.float64))


def test_a_window_is_ignored_in_decoding_too(mistral):
    """Or the cache would still forget what is behind it."""
    broken = the_reference(resolve("path/window:ignored").inject(mistral))
    rows = broken.teacher.continued(IDS, 1, broken.model, 100)
    logprobs = torch.log_softmax(rows, dim=-1)[torch.arange(149), torch.tensor(IDS[1:])]
    assert logprobs.tolist() == pytest.approx(broken.score([IDS])[0], abs=1e-5)


def test_the_body_is_narrow_and_its_ends_are_not(llama):
    model = the_reference(resolve("path/body-precision").inject(llama)).model
    decoder = model.base_model
    assert {parameter.dtype for parameter in decoder.layers.parameters()} == {torch.bfloat16}
    assert decoder.embed_tokens.weight.dtype is torch.float64
    assert model.get_output_embeddings().weight is decoder.embed_tokens.weight, "the tie was cut"
    assert decoder.rotary_emb.inv_freq.dtype is llama.model.base_model.rotary_emb.inv_freq.dtype
    whole = ReferenceBackend("testbed:llama").model
    _body_in(torch.float64)(whole)
    with torch.no_grad():
        assert torch.equal(whole(torch.tensor([IDS])).logits, llama.model(torch.tensor([IDS])).logits)


def test_fp8_saturates():
    keys = torch.tensor([500.0, -1e6, 0.3, 1.0])
    stored, _ = _LossyCache(None).update(keys, keys, 0)
    assert stored.tolist() == [448.0, -448.0, 0.3125, 1.0]


@pytest.mark.parametrize("spec", ["path/kv-precision", "path/weight-quantisation", "path/body-precision"])
def test_generating_and_scoring_agree(spec, llama):
    """The fault is in both, whether keys and values pass through a cache or not."""
    (completion,) = by(spec, llama, ask(20, temperature=1.0, max_tokens=8))
    (scores,) = resolve(spec).inject(llama).score([completion.sequence])
    assert completion.logprobs == pytest.approx(scores[19:], abs=0.1 if "body" in spec else 1e-4)
    (honest,) = llama.score([completion.sequence])
    assert max(abs(a - b) for a, b in zip(scores, honest, strict=True)) > 1e-3


@pytest.mark.parametrize("length", [20, 1])
def test_decoding_differs_from_prefill(length, llama):
    (completion,) = by("path/prefill-decode", llama, ask(length, temperature=1.0, max_tokens=6))
    (honest,) = llama.score([completion.sequence])
    error = np.abs(np.array(completion.logprobs) - np.array(honest[length - 1 :]))
    # The first token comes from the prefill, also where the prompt is one token long.
    assert error[0] < 1e-9
    assert error[1:].max() > 1e-5
    assert not errors("path/prefill-decode", llama).any()


def test_numbers_depend_on_the_batch_or_on_chance(llama):
    broken = resolve("path/batch-variance").inject(llama)
    alone, *by_rows = (broken.score([IDS] * rows)[0] for rows in (1, 2, 3, 3))
    assert alone == llama.score([IDS])[0]
    assert by_rows[1] == by_rows[2], "it is a matter of the batch, not of chance"
    noisy = resolve("path/nondeterminism").inject(llama)
    for one, other in ((by_rows[0], alone), (by_rows[0], by_rows[1]), [noisy.score([IDS])[0] for _ in "ab"]):
        assert 1e-6 < np.abs(np.array(one) - np.array(other)).mean() < 1e-2
