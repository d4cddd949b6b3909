"""The theorems of exact mode: one sequence has one set of bits, by whatever path it is computed.

Each is a property over random models, lengths, chunks, pages and company, and each is seen failing with one plain op
put back. Shapes: T tokens, H hidden size.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact
from zerodrift.exact.probe import threads
from zerodrift.exact.verification import Schedule, alone, differing_rows, packed, padded, paged

SIZES = ("hidden_size", "intermediate_size", "heads", "kv", "head_dim")


def shape(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True)), **more}


# Shapes that libraries treat differently: widths beside multiples of the vector, K above and below 1,024, heads of
# 16 to 128, groups of 1 to 6, windows inside and beyond a block, biases, per-head norms, scaled frequencies.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": shape("llama", (96, 172, 6, 2, 16)),
    "llama-wide": shape("llama", (64, 1100, 2, 2, 64)),
    "llama-biased": shape(
        "llama",
        (96, 333, 6, 1, 32),
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "llama-gelu": shape("llama", (72, 101, 3, 3, 24), hidden_act="gelu"),
    "qwen2": shape("qwen2", (88, 200, 4, 2, 22)),
    "qwen3": shape("qwen3", (160, 333, 2, 1, 128)),
    "mistral": shape("mistral", (64, 135, 4, 2, 64), sliding_window=7),
    "mistral-wide": shape("mistral", (64, 130, 4, 1, 16), sliding_window=70),
    # Heads of 256 for one kv head, as in Gemma 3 1B; a local and a global layer with rotary bases of their own.
    "gemma3": shape(
        "gemma3_text",
        (96, 150, 2, 1, 256),
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=168,
        final_logit_softcapping=5.0,
        num_hidden_layers=2,
    ),
    "gemma3-wide": shape(
        "gemma3_text",
        (64, 101, 4, 2, 24),
        sliding_window=70,
        layer_types=["full_attention", "sliding_attention"],
        num_hidden_layers=2,
    ),
    # Most experts of a step have few tokens; the second layer is dense.
    "qwen3-moe": shape(
        "qwen3_moe",
        (96, 130, 4, 2, 32),
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=44,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        num_hidden_layers=3,
    ),
    "qwen3-moe-wide": shape(
        "qwen3_moe", (64, 130, 2, 1, 64), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=1100
    ),
}
VOCAB = 131


def build(name: str) -> Any:
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(
        **{
            "num_attention_heads": shape.pop("heads"),
            "num_key_value_heads": shape.pop("kv"),
            "num_hidden_layers": 1 + (name in ("llama", "qwen3", "mistral")),
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "tie_word_embeddings": len(name) % 2 == 0,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **shape,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # transformers' own deviation of 0.02 would make attention uniform, and hide what it gets wrong.
                parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


@cache
def model_of(name: str, plain: frozenset[str] = frozenset()) -> Any:
    return exact.prepare(build(name), plain=plain)


def tokens(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in lengths]


names = st.sampled_from(sorted(SHAPES))
seeds = st.integers(0, 2**32)
# Around the edges of blocks and tiles, and anything between.
lengths = st.lists(
    st.one_of(st.sampled_from([1, 2, 3, 63, 64, 65, 127, 128, 129, 193]), st.integers(1, 100)),
    min_size=1,
    max_size=3,
)
block_sizes = st.sampled_from([1, 5, 8, 16, 24, 64, 96])
# A case is a sequence, and an example has up to three: four theorems of 50 examples are 400 cases, and the long profile
# draws 25 times as many and ten thousand below.
some = settings(max_examples=max(settings().max_examples // 4, 1))


@some
@given(names, seeds, lengths, block_sizes)
def test_any_chunking_in_any_company_is_the_whole(
    name: str, seed: int, lengths: list[int], size: int
) -> None:
    model, sequences = model_of(name), tokens(seed, lengths)
    with torch.no_grad():
        whole = alone(model, sequences)
    assert differing_rows(whole, paged(model, sequences, Schedule(seed, size))) == 0


@some
@given(names, seeds, lengths, block_sizes, block_sizes)
def test_neighbours_pages_and_arrivals_do_not_matter(
    name: str, seed: int, lengths: list[int], size: int, other_size: int
) -> None:
    """The same sequences, once with company, in other pages and another order."""
    model, sequences = model_of(name), tokens(seed, lengths)
    crowd = [*tokens(seed + 1, [5, 70, 1]), *sequences]
    quiet = paged(model, sequences, Schedule(seed, size, chunks=(1, 2, 200), share=1.0))
    busy = paged(model, crowd, Schedule(seed + 1, other_size, share=0.5))[3:]
    assert differing_rows(quiet, busy) == 0


@some
@given(names, seeds, lengths, st.sampled_from([5, 9, 17, 66]))
def test_decoding_token_by_token_is_the_trainers_forward(
    name: str, seed: int, lengths: list[int], most: int
) -> None:
    model, sequences = model_of(name), tokens(seed, [min(length, most) for length in lengths])
    decoded = paged(model, sequences, Schedule(seed, 16, chunks=(1,), share=1.0))
    trained = packed(model, sequences)
    assert trained[0].requires_grad
    assert differing_rows(decoded, trained) == 0


@some
@given(names, seeds, lengths, st.booleans())
def test_packed_and_padded_are_the_same(name: str, seed: int, lengths: list[int], left: bool) -> None:
    model, sequences = model_of(name), tokens(seed, lengths)
    with torch.no_grad():
        whole = alone(model, sequences)
        assert differing_rows(whole, padded(model, sequences, left=left)) == 0
    assert differing_rows(whole, packed(model, sequences)) == 0


@settings(max_examples=max(settings().max_examples // 10, 1))
@given(
    st.sampled_from(["llama-wide", "mistral", "qwen3", "mistral-wide", "gemma3", "qwen3-moe"]),
    seeds,
    lengths,
    st.sampled_from([2, 4]),
)
def test_threads_do_not_matter(name: str, seed: int, lengths: list[int], number: int) -> None:
    """One sequence and one kv head among them, and more threads than cores."""
    model, sequences = model_of(name), tokens(seed, lengths[:2])
    with torch.no_grad():
        with threads(1):
            whole = alone(model, sequences)
        with threads(number):
            several = packed(model, sequences)
            chunked = paged(model, sequences, Schedule(seed, 16, chunks=(1, 3, 17, 64)))
    assert differing_rows(whole, several) == 0
    assert differing_rows(whole, chunked) == 0


@pytest.mark.parametrize("number", [1, 2, 4])
def test_one_sequence_with_one_kv_head(number: int) -> None:
    """A single pair, which MKL's threads cut into rows: 2, 5, 7 … queries of one head once had other bits on two threads."""
    model, (sequence,) = model_of("qwen3"), tokens(1, [23])
    with torch.no_grad():
        with threads(1):
            whole = alone(model, [sequence])
        with threads(number):
            for chunk in (1, 2, 5, 7):
                found = paged(model, [sequence], Schedule(chunk, 16, chunks=(chunk,), share=1.0))
                assert differing_rows(whole, found) == 0


@some
@given(names, seeds, st.integers(1, 40), st.integers(1, 40))
def test_the_head_gives_a_row_the_same_bits_in_any_group(
    name: str, seed: int, count: int, other: int
) -> None:
    model = model_of(name)
    with torch.no_grad():
        hidden = alone(model, tokens(seed, [count + other]))[0]
        together = exact.head(model, hidden)
        apart = [exact.head(model, hidden[:count]), exact.head(model, hidden[count:])]
        single = [exact.head(model, row[None]) for row in hidden[:5]]
    assert differing_rows([together], [torch.cat(apart)]) == 0
    assert differing_rows([together[:5]], [torch.cat(single)]) == 0


@pytest.mark.parametrize("name", ["llama-wide", "qwen3"])
def test_a_page_that_changes_hands_keeps_no_trace(name: str) -> None:
    """A sequence full of NaN leaves its pages to others, and sits beside them in a step."""
    model, sequences = model_of(name), tokens(3, [100, 40])
    with torch.no_grad():
        whole = alone(model, sequences)
        schedule = Schedule(5, 16)
        kv = exact.PagedKV(model, 40, 16)
        for keys, values in kv.layers:
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
        assert differing_rows(whole, paged(model, sequences, schedule, kv)) == 0
        embedding = model.model.embed_tokens
        handle = embedding.register_forward_hook(
            lambda _, arguments, output: output.masked_fill((arguments[0] == VOCAB - 1)[..., None], torch.nan)
        )
        clean = [[token % (VOCAB - 1) for token in sequence] for sequence in sequences]
        expected = alone(model, clean)
        broken = [[VOCAB - 1] * 50, *clean]
        found = paged(model, broken, Schedule(6, 16, share=1.0))
        handle.remove()
    assert bool(found[0].isnan().all())
    assert differing_rows(expected, found[1:]) == 0


@pytest.mark.parametrize(
    ("op", "name", "path"),
    [
        ("linear", "llama", "paged"),
        ("linear", "qwen3", "packed"),
        ("attention", "llama", "paged"),
        ("attention", "mistral-wide", "paged"),
        ("activation", "llama-biased", "paged"),
        ("activation", "qwen3", "packed"),
    ],
)
def test_a_plain_op_is_seen(op: str, name: str, path: str) -> None:
    """The control: with one op as torch has it, the same comparison finds rows that differ."""
    model, sequences = model_of(name, frozenset({op})), tokens(1, [1, 150, 33, 65])
    with torch.no_grad():
        whole = alone(model, sequences)
        other = packed(model, sequences) if path == "packed" else paged(model, sequences, Schedule(1, 16))
    assert differing_rows(whole, other) > 0


@pytest.mark.long
@settings(max_examples=2500)
@given(names, seeds, lengths, block_sizes)
def test_ten_thousand_sequences(name: str, seed: int, lengths: list[int], size: int) -> None:
    """Four sequences each, by decode in pages and by the trainer's forward."""
    model, sequences = model_of(name), tokens(seed, (lengths * 4)[:4])
    found = paged(model, sequences, Schedule(seed, size))
    assert differing_rows(found, packed(model, sequences)) == 0
