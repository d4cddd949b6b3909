"""What a prefill may have made of a prompt: which tokens were read, where, and what saw what."""

from typing import Any

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.audit.counterfactual.attention import (
    AttentionChange,
    leaking,
    windowed,
    with_attention,
    wrong_groupings,
)
from zerodrift.audit.counterfactual.chunks import (
    counted_twice,
    early_start,
    first_position_early,
    late_start,
    sizes_within,
)
from zerodrift.audit.counterfactual.position import FirstOff, first_off


@pytest.fixture(scope="module")
def llama():
    return models.load("testbed:llama", dtype="float64")


IDS = torch.tensor([[7 * place % 500 + 4 for place in range(20)]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = model(IDS, use_cache=False).logits[0]
    return rows


def test_a_chunk_that_begins_late_loses_a_token_where_another_is_left():
    assert late_start(4, 10, 11).places == (0, 1, 2, 3, 5, 6, 7, 9, 10)
    # The second chunk is one token: there is nothing else to read.
    assert late_start(4, 5, 7).places == tuple(range(7))
    assert late_start(4, 4, 12).places == tuple(range(12)), "what is decoded is in no chunk"


def test_a_chunk_that_begins_early_reads_a_token_twice_at_its_own_position():
    reading = early_start(4, 10, 11)
    assert reading.places == reading.positions == (0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10)


def test_positions_of_chunks():
    assert first_position_early(4, 10, 11).positions == (0, 1, 2, 3, 3, 5, 6, 7, 7, 9, 10)
    assert counted_twice(4, 10, 11).positions == (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11)
    assert counted_twice(4, 4, 11).positions == tuple(range(11))


def test_prompts_that_are_right_bracket_the_size_of_a_chunk():
    prompts = np.array([10, 64, 65, 129, 200])
    assert first_off(np.array([False, False, True, True, False]), prompts) == FirstOff(64, 65)
    assert first_off(np.zeros(5, dtype=bool), prompts) is None
    assert sizes_within(FirstOff(64, 65)) == (64,)
    assert 64 in sizes_within(FirstOff(65, 127))
    assert sizes_within(FirstOff(0, 3)) == ()


def test_a_window_hides_what_is_further_back_and_nothing_else(llama):
    plain, narrow = logits(llama), logits(with_attention(llama, windowed(8)))
    assert torch.allclose(plain[:8], narrow[:8])
    assert not torch.isclose(plain[8:], narrow[8:]).all(dim=-1).any()
    assert torch.allclose(logits(with_attention(llama, windowed(20))), plain)


def test_a_leak_reaches_the_prompt_and_what_follows_it(llama):
    plain, leaky = logits(llama), logits(with_attention(llama, leaking(prompt=10, ahead=1)))
    assert not torch.isclose(plain[:10], leaky[:10]).all(dim=-1).any()
    assert torch.allclose(logits(with_attention(llama, leaking(prompt=1, ahead=1))), plain)


def test_no_change_is_none(llama):
    assert torch.allclose(logits(with_attention(llama, AttentionChange())), logits(llama))
    blocks = AttentionChange(heads=(0, 0, 1, 1))
    assert torch.allclose(logits(with_attention(llama, blocks)), logits(llama))


def test_the_model_is_left_as_it_was(llama):
    before = logits(llama)
    with_attention(llama, windowed(2))
    assert torch.equal(logits(llama), before)


def test_groupings_are_those_that_are_wrong(llama):
    found = wrong_groupings(llama)
    assert set(found.values()) == {(0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 0, 0)}
    llama.config.num_key_value_heads, own = 4, llama.config.num_key_value_heads
    try:
        assert wrong_groupings(llama) == {}
    finally:
        llama.config.num_key_value_heads = own
