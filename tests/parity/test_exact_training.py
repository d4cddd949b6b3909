"""The trainer's side: gradients are those of the vanilla model, and no way of training changes a bit of the forward.

The outside reference is transformers as it comes, in fp32 and fp64.
"""

import copy
import random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift import exact, models
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import FingerprintMismatch, InvalidPrompt
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.exact import logprobs
from zerodrift.exact.verification import Schedule, alone, differing_rows, packed, padded, paged
from zerodrift.sampler.processing import TokenHistory, processed_logprobs

TESTBEDS = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "qwen3-moe")
VERSION = WeightVersion("initial", "0" * 64)


@pytest.fixture(scope="module", params=TESTBEDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(vanilla, prepared) with the same weights."""
    return models.load(f"testbed:{request.param}"), exact.prepare(models.load(f"testbed:{request.param}"))


def tokens(seed: int, *lengths: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(512) for _ in range(length)] for length in lengths]


def completion(prompt: list[int], output: list[int], kind: LogprobKind, **sampling: Any) -> Completion:
    return Completion(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(output),
        logprobs=(-1.0,) * len(output),
        kind=kind,
        sampling=SamplingParams(max_tokens=512, **sampling),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(VERSION, 0, len(output)),),
        fingerprint="x",
    )


def test_close_to_vanilla(pair: tuple[Any, Any]) -> None:
    vanilla, prepared = pair
    with torch.no_grad():
        for ids in tokens(0, 300, 64, 7, 1):
            expected = vanilla(torch.tensor([ids])).logits[0].log_softmax(-1)
            found = prepared(torch.tensor([ids])).logits[0].log_softmax(-1)
            assert float((expected - found).abs().max()) <= 1e-4
            # The engine's head, soft cap included, is the trainer's.
            logits = prepared(torch.tensor([ids])).logits[0]
            assert torch.equal(logits, exact.head(prepared, alone(prepared, [ids])[0]))


def test_restore_gives_vanilla_bits_back(pair: tuple[Any, Any]) -> None:
    vanilla, prepared = pair
    ids = torch.tensor(tokens(1, 90))
    other = exact.restore(copy.deepcopy(prepared))
    assert type(other.lm_head) is torch.nn.Linear
    with torch.no_grad():
        assert torch.equal(other(ids).logits, vanilla(ids).logits)
        assert not torch.equal(prepared(ids).logits, vanilla(ids).logits)


def test_gradients_are_those_of_vanilla_in_fp64(pair: tuple[Any, Any]) -> None:
    vanilla, prepared = pair
    reference = copy.deepcopy(vanilla).double()
    if reference.config.model_type == "qwen3_moe":
        # torch's grouped product has no fp64.
        reference.set_experts_implementation("eager")
    sequences = tokens(2, 130, 40)
    loss = prepared.model.norm.weight.new_zeros(())
    for hidden, ids in zip(packed(prepared, sequences), sequences, strict=True):
        loss = loss + torch.nn.functional.cross_entropy(
            exact.head(prepared, hidden)[:-1], torch.tensor(ids[1:])
        )
    loss.backward()
    expected = sum(
        torch.nn.functional.cross_entropy(
            reference(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])
        )
        for ids in sequences
    )
    assert isinstance(expected, torch.Tensor)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-5
    for (name, found), wanted in zip(prepared.named_parameters(), reference.parameters(), strict=True):
        assert found.grad is not None, name
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert float(error) < 2e-5, name
    prepared.zero_grad()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "qwen3-moe"])
def test_training_modes_change_no_bit(name: str) -> None:
    model = exact.prepare(models.load(f"testbed:{name}"))
    sequences = tokens(3, 70, 9, 130)
    with torch.no_grad():
        plain = alone(model, sequences)
    model.train()
    assert differing_rows(plain, packed(model, sequences)) == 0
    assert differing_rows(plain, padded(model, sequences, left=True)) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing_rows(plain, packed(model, sequences)) == 0
        assert differing_rows(plain, paged(model, sequences, Schedule(1, 16))) == 0
        assert exact.head(model, plain[0]).dtype is torch.float32
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept = packed(model, sequences)
    assert differing_rows(plain, kept) == 0
    torch.cat(kept).square().mean().backward()
    with_checkpoints = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_disable()
    torch.cat(packed(model, sequences)).square().mean().backward()
    torch.testing.assert_close(with_checkpoints, model.model.layers[0].self_attn.q_proj.weight.grad)


def test_the_forward_follows_the_optimizer_and_comes_back() -> None:
    model, sequences = exact.prepare(models.load("testbed:llama")), tokens(4, 33)
    before = alone(model, sequences)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before[0].square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        moved = paged(model, sequences, Schedule(0, 16))
        assert differing_rows(before, moved) == 33
        assert differing_rows(moved, alone(model, sequences)) == 0
        model.load_state_dict(saved)
        assert differing_rows(before, paged(model, sequences, Schedule(1, 16))) == 0
    # Through .data, which torch does not count: seen where gradients are on, and after a refresh elsewhere.
    model.model.layers[1].mlp.down_proj.weight.data.mul_(2)
    changed = alone(model, sequences)
    assert differing_rows(before, changed) == 33
    model.model.layers[1].mlp.down_proj.weight.data.div_(2)
    exact.refresh(model)
    with torch.no_grad():
        assert differing_rows(before, alone(model, sequences)) == 0


SHAPES = st.just({"temperature": 0.0}) | st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([0, 1, 40]),
        "min_p": st.sampled_from([0.0, 0.05]),
    }
)
REST = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {3: 2.0, 77: -1.5}]),
        "min_tokens": st.sampled_from([0, 3]),
    }
)
SAMPLING = st.builds(lambda shape, rest: {**shape, **rest}, SHAPES, REST)


@settings(max_examples=60)
@given(SAMPLING, st.integers(0, 2**20), st.integers(1, 30), st.sampled_from([512, 4099]))
def test_processing_gives_a_row_the_same_bits_in_any_group(
    sampling: dict[str, Any], seed: int, count: int, vocabulary: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * 4
    params = SamplingParams(max_tokens=64, **sampling)
    output = torch.randint(vocabulary, (count,), generator=generator).tolist()
    rows = [TokenHistory((1, 2, 3), output[:index]) for index in range(count)]
    together = exact.processed(logits, params, rows, (0,))
    single = [exact.processed(logits[i : i + 1], params, rows[i : i + 1], (0,)) for i in range(count)]
    assert differing_rows([together], [torch.cat(single)]) == 0


@settings(max_examples=20)
@given(SAMPLING, st.integers(0, 2**20), st.sampled_from(TESTBEDS), st.sampled_from(LogprobKind))
def test_token_logprobs_are_those_of_decoding(
    sampling: dict[str, Any], seed: int, name: str, kind: LogprobKind
) -> None:
    """Given tokens, decoded one by one in pages in each other's company, then scored by the trainer at once."""
    model = prepared_testbed(name)
    prompts, outputs = tokens(seed, 5, 70, 1), tokens(seed + 1, 9, 3, 12)
    outputs = [_possible(output, sampling) for output in outputs]
    completions = [
        completion(prompt, output, kind, **sampling) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    sequences = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    decoded = paged(model, sequences, Schedule(seed, 16, chunks=(1, 4)))
    scored = exact.token_logprobs(model, completions)
    for each, hidden, found in zip(completions, decoded, scored, strict=True):
        assert found.requires_grad
        for index, token in enumerate(each.token_ids):
            row = hidden[len(each.prompt_token_ids) + index - 1][None]
            with torch.no_grad():
                logits = exact.head(model, row)
            history = TokenHistory(each.prompt_token_ids, each.token_ids[:index])
            expected = (
                logits.log_softmax(-1)
                if kind is LogprobKind.RAW
                else processed_logprobs(logits, each.sampling, [history], (1,))
            )
            assert expected[0, token].item() == found[index].item()


def test_logprobs_are_differentiable_through_truncation() -> None:
    model = prepared_testbed("qwen3")
    params = SamplingParams(top_p=0.9, temperature=0.7, max_tokens=6, seed=1)
    (done,) = Engine(model).generate([5, 6, 7], params)
    (found,) = exact.token_logprobs(model, [done])
    found.sum().backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0


def test_outputs_of_other_numerics_are_refused() -> None:
    outputs = Engine("testbed:llama").generate([[5, 6]], SamplingParams(max_tokens=4, seed=1))
    other = exact.prepare(models.load("testbed:llama"), plain=frozenset({"linear"}))
    with pytest.raises(FingerprintMismatch, match="linear is onednn-prepacked in the engine and plain"):
        exact.token_logprobs(other, outputs)


def test_what_a_minimum_forbids_must_be_known_to_both() -> None:
    model = prepared_testbed("llama")
    free, bound = Engine("testbed:llama").generate(
        [[5, 6]] * 2, [SamplingParams(max_tokens=4, seed=1, min_tokens=minimum) for minimum in (0, 2)]
    )
    assert exact.token_logprobs(model, [bound])[0].tolist() == list(bound.logprobs)
    exact.token_logprobs(model, [free], stop_ids=())
    with pytest.raises(FingerprintMismatch, match="stop_ids"):
        exact.token_logprobs(model, [bound], stop_ids=())


def test_an_output_without_tokens_scores_as_nothing() -> None:
    outputs = Engine("testbed:llama").generate(
        [[5, 6], [5, -1], [7]], SamplingParams(max_tokens=4, seed=1), on_error="return"
    )
    found = exact.token_logprobs(prepared_testbed("llama"), outputs)
    assert [tuple(each.tolist()) for each in found] == [output.logprobs for output in outputs]
    assert [len(each) for each in found] == [4, 0, 4]


class Ids(NamedTuple):
    """A completion as anybody may bring it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    kind: LogprobKind = LogprobKind.RAW


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_last_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    done = Ids((5, 6), (7, token))
    with pytest.raises(InvalidPrompt, match=f"has token {token}"):
        exact.token_logprobs(prepared_testbed("llama"), [done])


@pytest.mark.parametrize("kind", LogprobKind)
def test_long_outputs_are_scored_in_parts_with_the_same_bits(
    kind: LogprobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared_testbed("llama")
    prompts, outputs = tokens(9, 3, 8), tokens(10, 40, 5)
    done = [completion(a, b, kind, frequency_penalty=0.3) for a, b in zip(prompts, outputs, strict=True)]
    gradients, found = [], []
    for budget in (2**28, 4 * 512 * 7):
        monkeypatch.setattr(logprobs, "LOGIT_BYTES", budget)
        found.append(exact.token_logprobs(model, done))
        torch.cat(found[-1]).sum().backward()
        gradients.append(model.model.norm.weight.grad.clone())
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.testing.assert_close(*gradients)


def _possible(output: list[int], sampling: dict[str, Any]) -> list[int]:
    return [7 if token == 1 else token for token in output] if sampling["min_tokens"] else output


_prepared: dict[str, Any] = {}


def prepared_testbed(name: str) -> Any:
    if name not in _prepared:
        _prepared[name] = exact.prepare(models.load(f"testbed:{name}"))
    return _prepared[name]


def test_an_empty_list_and_impossible_completions() -> None:
    model = prepared_testbed("llama")
    assert exact.token_logprobs(model, []) == []
    done = completion([1], [2], LogprobKind.RAW)
    with pytest.raises(ValueError, match="has token 512"):
        exact.token_logprobs(model, [msgspec.structs.replace(done, prompt_token_ids=(512,))])
    with pytest.raises(ValueError, match="has no prompt"):
        exact.token_logprobs(model, [Ids((), (2,))])
    with pytest.raises(ValueError, match="completions are a Completion; give a list"):
        exact.token_logprobs(model, done)
