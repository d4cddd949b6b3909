from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift import models
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import entries
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.core.request import Request
from zerodrift.faults.registry import resolve
from zerodrift.faults.sampling import _frequent_tokens, write_model_with_defaults
from zerodrift.sampler.processing import histories, processed_logprobs

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
Same = Callable[[Sequence[Completion], Sequence[Completion]], bool]


def outputs(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.logprobs, each.top_logprobs, each.finish_reason) for each in completions]


@pytest.mark.parametrize(
    ("spec", "really"),
    [
        ("semantic/temperature:0.9-instead", {"temperature": 0.8 * 0.9}),
        ("semantic/temperature:ignored", {"temperature": 1.0}),
        ("semantic/truncation-mass:top-p-0.95", {"top_p": 0.95}),
        ("semantic/truncation-mass:top-k-20", {"top_k": 20}),
        ("semantic/penalty:repetition-1.05", {"repetition_penalty": 1.05}),
        ("semantic/penalty:presence-0.5", {"presence_penalty": 0.5}),
        ("semantic/penalty:frequency-0.3", {"frequency_penalty": 0.3}),
    ],
)
def test_other_parameters_are_used_than_claimed(
    spec: str, really: dict[str, float], llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(9, 30, n=2, max_tokens=12, logprobs=2)
    broken = tell(resolve(spec).inject(llama).generate(requests))
    honest = tell(llama.generate(ask(9, 30, n=2, max_tokens=12, logprobs=2, **really)))
    assert outputs(broken) == outputs(honest)
    assert outputs(broken) != outputs(tell(llama.generate(requests)))
    assert [each.sampling for each in broken] == [request.sampling for request in requests for _ in range(2)]


@pytest.mark.parametrize(
    ("spec", "really"),
    [
        ("semantic/truncation-mass:top-p-0.95-full-mass", {"top_p": 0.95}),
        ("semantic/sampling-bias", {"temperature": 0.8 * 1.2}),
    ],
)
def test_right_numbers_for_tokens_of_another_distribution(
    spec: str, really: dict[str, float], llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(9, 30, n=2, max_tokens=12, logprobs=3)
    broken = tell(resolve(spec).inject(llama).generate(requests))
    sampled = tell(llama.generate(ask(9, 30, n=2, max_tokens=12, logprobs=3, **really)))
    assert [each.token_ids for each in broken] == [each.token_ids for each in sampled]
    assert all(a.logprobs != b.logprobs for a, b in zip(broken, sampled, strict=True))
    # The first sampled token was drawn after the same prompt, so an honest engine shows what it should carry.
    honest = tell(llama.generate(ask(9, 30, n=2, max_tokens=12, logprobs=500)))
    for each, right in zip(broken, honest, strict=True):
        table = {entry.token_id: entry.logprob for entry in right.top_logprobs[0]}
        assert each.logprobs[0] == pytest.approx(table[each.token_ids[0]], abs=1e-9)
        for entry in each.top_logprobs[0]:
            assert entry.logprob == pytest.approx(table[entry.token_id], abs=1e-9)


def test_right_numbers_are_those_of_every_parameter_that_was_requested(
    llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    """Computed here by the code that the fault must not use."""
    requests = ask(
        9,
        30,
        n=2,
        max_tokens=12,
        min_tokens=6,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={9: 1.0},
    )
    for each in tell(resolve("semantic/sampling-bias").inject(llama).generate(requests)):
        prompt, output = each.prompt_token_ids, each.token_ids
        (logits_TV,) = llama.teacher.logits([each.sequence], [len(prompt)])
        right_TV = processed_logprobs(
            logits_TV, requests[0].sampling, histories(prompt, output), llama.facts.eos_token_ids
        )
        assert each.logprobs == pytest.approx(entries(right_TV, output).tolist(), abs=1e-9)
        plain = entries(logits_TV / 0.8, output).tolist()
        assert each.logprobs != pytest.approx(plain, abs=1e-3)


def test_right_numbers_come_from_scoring_where_the_engine_is_a_stranger(
    elsewhere: Callable[..., Any], llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    fault = resolve("semantic/sampling-bias")
    plain = ask(9, 12, temperature=1.0)
    for stranger, known in zip(
        tell(fault.inject(elsewhere()).generate(plain)),
        tell(fault.inject(llama).generate(plain)),
        strict=True,
    ):
        assert stranger.token_ids == known.token_ids
        assert stranger.logprobs == pytest.approx(known.logprobs, abs=1e-9)
    for asked in ({"temperature": 0.8}, {"temperature": 1.0, "presence_penalty": 0.1}):
        with pytest.raises(CapabilityMissing):
            fault.inject(elsewhere()).generate(ask(9, **asked))
    assert fault.inject(llama).generate([]) == []


def test_tokens_without_a_logprob_are_refused(llama: ReferenceBackend, ask: Ask) -> None:
    with pytest.raises(InvalidValue):
        resolve("semantic/sampling-bias").inject(llama).generate(ask(9, top_p=0.9))


def test_frequent_tokens_are_biased(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    chosen = _frequent_tokens(llama)
    assert chosen == _frequent_tokens(llama)
    assert len(set(chosen)) == 5
    assert not set(chosen) & set(llama.facts.eos_token_ids)
    broken = tell(resolve("semantic/logit-bias").inject(llama).generate(ask(9, 30, logit_bias={9: 1.0})))
    honest = tell(llama.generate(ask(9, 30, logit_bias={9: 1.0, **dict.fromkeys(chosen, 2.0)})))
    assert outputs(broken) == outputs(honest)


def test_defaults_of_the_model_fill_in_what_a_request_leaves_out(
    with_defaults: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    broken = resolve("semantic/generation-config").inject(with_defaults)
    filled = tell(with_defaults.generate(ask(30, max_tokens=12, top_p=0.9, repetition_penalty=1.05)))
    assert outputs(tell(broken.generate(ask(30, max_tokens=12)))) == outputs(filled)
    stated = ask(30, max_tokens=12, top_p=0.5, repetition_penalty=1.3)
    assert tell(broken.generate(stated)) == tell(with_defaults.generate(stated))
    # A greedy engine has nothing to cut off, whatever the defaults say.
    penalised = tell(with_defaults.generate(ask(30, temperature=0.0, repetition_penalty=1.05)))
    assert outputs(tell(broken.generate(ask(30, temperature=0.0)))) == outputs(penalised)


def test_a_model_with_defaults_can_be_written(tmp_path: Path) -> None:
    directory = write_model_with_defaults("testbed:qwen3", tmp_path / "model", {"top_k": 5})
    assert models.facts(directory).generation_defaults == {"top_k": 5}
    assert models.facts(directory).eos_token_ids == models.facts("testbed:qwen3").eos_token_ids


def test_samples_share_their_noise(llama: ReferenceBackend, ask: Ask, tell: Tell, same: Same) -> None:
    (answer,) = resolve("semantic/seed").inject(llama).generate(ask(9, n=3))
    assert [each.sample_index for each in answer.completions] == [0, 1, 2]
    assert len(set(map(msgspec.json.encode, outputs(answer.completions)))) == 1
    honest = tell(llama.generate(ask(9, n=3)))
    assert same(answer.completions[:1], honest[:1])
    assert len({each.token_ids for each in honest}) == 3


def test_an_unseeded_request_reports_the_seed_that_was_used(llama: ReferenceBackend, ask: Ask) -> None:
    (answer,) = resolve("semantic/seed").inject(llama).generate(ask(9, n=2, seed=None))
    assert len({each.sampling.seed for each in answer.completions}) == 1
    assert answer.completions[0].sampling.seed is not None
