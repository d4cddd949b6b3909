from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.faults.precision import _body_in, _LossyCache, _quantised
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import the_reference

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]

IDS = tuple(range(4, 84))


def gap(spec: str, engine: ReferenceBackend) -> float:
    """Mean difference of scores, in nats."""
    broken, honest = resolve(spec).inject(engine).score([IDS])[0], engine.score([IDS])[0]
    return float(np.abs(np.array(broken) - np.array(honest)).mean())


@pytest.mark.parametrize(
    ("spec", "least", "most"),
    [
        ("path/head-precision:bf16", 1e-3, 1e-1),
        ("path/body-precision:bf16", 1e-3, 1e-1),
        ("path/body-precision:fp16", 1e-4, 2e-2),
        ("path/weight-quantisation:4-bit", 1e-1, 3.0),
        ("path/weight-quantisation:8-bit", 1e-3, 1e-1),
        ("path/kv-precision:fp8", 1e-2, 5e-1),
        ("path/nondeterminism:noise", 1e-5, 1e-2),
    ],
)
def test_less_precision_shows_in_its_order_of_magnitude(
    spec: str, least: float, most: float, llama: ReferenceBackend
) -> None:
    assert least < gap(spec, llama) < most


def test_the_logits_of_a_bf16_head_lie_on_the_bf16_grid(mistral: ReferenceBackend) -> None:
    broken = the_reference(resolve("path/head-precision").inject(mistral))
    (logits,) = broken.teacher.logits([IDS], [1])
    (honest,) = mistral.teacher.logits([IDS], [1])
    assert logits.dtype is honest.dtype
    assert torch.equal(logits.bfloat16().to(logits.dtype), logits)
    assert not torch.equal(honest.bfloat16().to(honest.dtype), honest)


def test_the_body_is_narrow_and_its_ends_are_not(llama: ReferenceBackend) -> None:
    model = the_reference(resolve("path/body-precision").inject(llama)).model
    decoder = model.base_model
    assert {parameter.dtype for parameter in decoder.layers.parameters()} == {torch.bfloat16}
    assert decoder.embed_tokens.weight.dtype is torch.float64
    assert model.get_output_embeddings().weight is decoder.embed_tokens.weight, "the tie was cut"
    assert decoder.rotary_emb.inv_freq.dtype is llama.model.base_model.rotary_emb.inv_freq.dtype


def test_a_body_in_its_own_dtype_is_no_fault(llama: ReferenceBackend) -> None:
    model = ReferenceBackend("testbed:llama").model
    _body_in(torch.float64)(model)
    ids = torch.tensor([IDS])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama.model(ids).logits)


def test_quantised_weights_have_few_levels(llama: ReferenceBackend) -> None:
    model = ReferenceBackend("testbed:llama").model
    _quantised(bits=4, group=32)(model)
    weight, before = (m.base_model.layers[0].self_attn.q_proj.weight for m in (model, llama.model))
    assert all(len(group.unique()) <= 15 for group in weight.view(-1, 32)[:64])
    largest = before.view(-1, 32).abs().amax(dim=-1, keepdim=True)
    assert bool(((weight - before).view(-1, 32).abs() <= largest / 14 * 1.001).all()), "not the nearest level"
    assert torch.equal(model.base_model.norm.weight, llama.model.base_model.norm.weight)
    assert torch.equal(model.base_model.embed_tokens.weight, llama.model.base_model.embed_tokens.weight)


def test_fp8_saturates() -> None:
    keys = torch.tensor([500.0, -1e6, 0.3, 1.0])
    stored, _ = _LossyCache(None).update(keys, keys, 0)
    assert stored.tolist() == [448.0, -448.0, 0.3125, 1.0]


@pytest.mark.parametrize("spec", ["path/kv-precision", "path/weight-quantisation", "path/body-precision"])
def test_generating_and_scoring_agree(spec: str, llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    """The fault is in both, whether keys and values pass through a cache or not."""
    broken = resolve(spec).inject(llama)
    (completion,) = tell(broken.generate(ask(20, temperature=1.0, max_tokens=8)))
    (scores,) = broken.score([completion.sequence])
    near = 0.1 if "body" in spec else 1e-4
    assert completion.logprobs == pytest.approx(scores[19:], abs=near)
    (honest,) = llama.score([completion.sequence])
    assert max(abs(a - b) for a, b in zip(scores, honest, strict=True)) > 1e-3


def test_decoding_differs_from_prefill(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    broken = resolve("path/prefill-decode").inject(llama)
    assert broken.score([IDS]) == llama.score([IDS])
    for length in (20, 1):
        (completion,) = tell(broken.generate(ask(length, temperature=1.0, max_tokens=6)))
        (honest,) = llama.score([completion.sequence])
        errors = np.abs(np.array(completion.logprobs) - np.array(honest[length - 1 :]))
        # The first token comes from the prefill, also where the prompt is one token long.
        assert errors[0] < 1e-9
        assert errors[1:].max() > 1e-5


def test_numbers_depend_on_the_rows_of_the_batch(llama: ReferenceBackend) -> None:
    broken = resolve("path/batch-variance").inject(llama)
    alone = broken.score([IDS])
    assert alone == llama.score([IDS])
    by_rows = [broken.score([IDS] * rows)[0] for rows in (2, 3, 4)]
    for scores in by_rows:
        assert 1e-6 < np.abs(np.array(scores) - np.array(alone[0])).mean() < 1e-2
    assert by_rows[0] != by_rows[1] != by_rows[2]
    assert broken.score([IDS] * 3)[0] == by_rows[1], "it is a matter of the batch, not of chance"


def test_the_same_call_gives_other_numbers(llama: ReferenceBackend, ask: Ask) -> None:
    broken = resolve("path/nondeterminism").inject(llama)
    first, second = broken.score([IDS])[0], broken.score([IDS])[0]
    assert 1e-6 < np.abs(np.array(first) - np.array(second)).mean() < 1e-2
    assert broken.generate(ask(9)) != broken.generate(ask(9))
