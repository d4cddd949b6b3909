"""A model that keeps no keys and values is computed whole: no token is ever scored without those before it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tiny_models import tiny

from zerodrift.backends.generation import sample
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.errors import UnsupportedModel
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.family.abilities import cache_in, has_kv_cache, masks_padding, require_causal

WITHOUT = ("openai-gpt", "rwkv", "recurrent_gemma")
SEQUENCES = [list(range(5, 5 + length)) for length in (40, 17, 23)]
NEAR = 1e-4


def gaps(found: list[list[float]], expected: list[list[float]]) -> float:
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.parametrize("model_type", WITHOUT)
def test_every_layout_sees_the_whole_context(model_type):
    model = tiny(model_type)
    assert not has_kv_cache(model)
    assert not masks_padding(model)
    plain = Teacher(model).score(SEQUENCES)
    for layout in Layout:
        teacher = Teacher(model, layout=layout, chunk=7)
        assert teacher.layout in (Layout.ALONE, Layout.PADDED)
        assert gaps(teacher.score(SEQUENCES), plain) < NEAR
    # What is not to happen: the second half of a sequence without the first.
    assert gaps(Teacher(model).score([SEQUENCES[0][20:]]), [plain[0][20:]]) > 100 * NEAR


@pytest.mark.parametrize("model_type", WITHOUT)
def test_nothing_follows_from_what_is_not_kept(model_type):
    model = tiny(model_type)
    teacher = Teacher(model)
    with pytest.raises(UnsupportedModel):
        teacher.continued(SEQUENCES[0], 1, model, 20)
    for split in (0, 40):
        assert teacher.continued(SEQUENCES[0], 1, model, split).shape[0] == 39


@pytest.mark.parametrize("model_type", [*WITHOUT, "mamba"])
def test_samples_of_prompts_of_mixed_length_are_what_the_model_computes(model_type):
    model = tiny(model_type)
    sampling = SamplingParams(max_tokens=5, seed=1, ignore_eos=True, n=2)
    assert masks_padding(model) is (model_type == "mamba")
    requests = [Request(Prompt(tuple(ids)), sampling) for ids in SEQUENCES]
    rows = sample(model, requests, eos_ids=(), max_len=64, batch=4, decode=str)
    assert [len(row.prompt) for row in rows] == [40, 40, 17, 17, 23, 23]
    scored = Teacher(model).score([[*row.prompt, *row.token_ids] for row in rows])
    assert gaps([row.logprobs for row in rows], [scores[-5:] for scores in scored]) < NEAR


def test_a_cache_that_does_not_come_back_is_refused():
    kept = object()
    assert cache_in(SimpleNamespace(past_key_values=kept)) is kept
    for output in (SimpleNamespace(past_key_values=None), SimpleNamespace()):
        with pytest.raises(UnsupportedModel):
            cache_in(output)


class LosesItsCache(Teacher):
    """As a model that takes keys and values, and gives none back."""

    def _forward(self, ids_BL: torch.Tensor, model: Any = None, **options: Any) -> Any:
        output = super()._forward(ids_BL, model, **options)
        output.past_key_values = None
        return output


@pytest.mark.parametrize("layout", [Layout.CHUNKED, Layout.DECODED])
def test_no_chunk_is_scored_without_its_context(layout):
    with pytest.raises(UnsupportedModel):
        LosesItsCache(tiny("gpt2"), layout=layout).score(SEQUENCES)


def test_a_model_that_reads_whole_texts_is_refused():
    for model in (tiny("xlnet"), tiny("bert")):
        with pytest.raises(UnsupportedModel):
            require_causal(model)
    broken = tiny("gpt2")
    broken.forward = None  # raises what nobody of ours raises
    with pytest.raises(UnsupportedModel):
        require_causal(broken)
    for model in (tiny("openai-gpt"), tiny("mixtral"), tiny("bert", is_decoder=True)):
        require_causal(model)
