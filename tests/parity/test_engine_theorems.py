"""The engine's promise as theorems: what a request gets is a function of weights, parameters and tokens alone.

Each theorem compares one way of serving a handful of requests with another, bit for bit: tokens, logprobs,
alternatives. Prompts, lengths, sampling and schedules are drawn; models are random ones of every family. A theorem is
worth something only if it can fail, so each is also run with one op as torch has it, and must then find differences.
"""

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import zerodrift as zd
from zerodrift.core.completion import FinishReason
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output, SampleUpdate
from zerodrift.models.testbed_config import CONFIGS

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY, CONTEXT = 131, 192
MODELS = 3
"""Random ones of each family."""


@cache
def model_of(family: str, seed: int = 0, plain: str = "") -> Any:
    """A random model, small enough for a step in milliseconds; `plain` names an op to leave as torch has it."""
    config = {
        **CONFIGS[family],
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
    }
    if family == "mistral":
        config["sliding_window"] = 24
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Wide enough that tokens differ in likelihood: near-uniform rows hide a wrong last bit.
                weight.normal_(0, 2.5 / weight.shape[-1] ** 0.5, generator=generator)
            elif "norm" not in name:
                weight.normal_(0, 0.3, generator=generator)
    return zd.exact.prepare(model, plain=frozenset({plain} - {""}))


@dataclasses.dataclass(frozen=True)
class Case:
    """One request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How requests are served. None of it may matter."""

    block_size: int = 16
    max_num_seqs: int = 16
    spare_budget: int = 1000
    caching: bool = False
    tight: bool = False
    """Only as many blocks as the largest request needs: others are preempted."""
    order: int = 0
    """Seed of the order of arrival."""
    gap: int = 0
    """Steps between arrivals."""
    decode_rounds: int = 1


def prompt_of(length: int, seed: int, shared: bool) -> tuple[int, ...]:
    """Half of the prompts begin alike, so that there is something to share."""
    draw = random.Random(seed)
    tail = draw.randrange(VOCABULARY)
    return (
        (*(1 + place % 120 for place in range(length - 1)), tail)
        if shared
        else tuple(draw.randrange(VOCABULARY) for _ in range(length))
    )


# Up to three blocks of 64 keys.
LENGTHS = st.integers(1, 60) | st.integers(1, 60) | st.integers(61, 150)
PROMPTS = st.builds(prompt_of, LENGTHS, st.integers(0, 2**20), st.booleans())
DISTRIBUTIONS = st.just({"temperature": 0.0}) | st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 1.0, 0.7, 1.3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9]),
        "top_k": st.sampled_from([0, 0, 20]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02]),
        "n": st.sampled_from([1, 1, 1, 2]),
    }
)
REST = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.2]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3]),
        "logit_bias": st.sampled_from([{}, {}, {3: 2.0, 7: -1.0}]),
        "seed": st.integers(0, 2**20),
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.sampled_from([0, 1]),
        "logprobs": st.sampled_from([0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, None, 2]),
        "stop_token_ids": st.sampled_from([(), (5, 6, 7)]),
    }
)
SAMPLING = st.builds(lambda shape, rest: SamplingParams(**shape, **rest), DISTRIBUTIONS, REST)
CASES = st.lists(st.builds(Case, PROMPTS, SAMPLING), min_size=8, max_size=16)


def engine_for(model: Any, cases: Sequence[Case], schedule: Schedule) -> Engine:
    longest = max(len(case.prompt) + case.sampling.max_tokens - 1 for case in cases)
    needed = -(-longest // schedule.block_size)
    return Engine(
        model,
        block_size=schedule.block_size,
        num_blocks=needed if schedule.tight else needed * 2 * len(cases) + 1,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_seqs + schedule.spare_budget,
        enable_prefix_caching=schedule.caching,
        decode_rounds=schedule.decode_rounds,
        # A theorem looks at the bits itself, also where a plain op is to be seen failing it.
        logprob_check_interval=0,
    )


def ended(updates: Sequence[SampleUpdate]) -> list[Output]:
    return [update.output for update in updates if update.output is not None]


def serve(engine: Engine, cases: Sequence[Case], schedule: Schedule) -> list[Output]:
    """All requests, in the schedule's order of arrival; outputs in the order of cases."""
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(schedule.order)).tolist()
    outputs = []
    for number in order if schedule.order else range(len(cases)):
        engine.add_request(list(cases[number].prompt), cases[number].sampling, request_id=str(number))
        for _ in range(schedule.gap):
            outputs += ended(engine.step())
    while engine.has_unfinished:
        outputs += ended(engine.step())
    return sorted(outputs, key=lambda output: (int(output.request_id), output.sample_index))


def differing(ones: Sequence[Output], others: Sequence[Output]) -> int:
    """Outputs that are not the same in every bit. Floats are compared as they are: equal means equal bits."""
    assert len(ones) == len(others)
    assert all(output.finish_reason is not FinishReason.ERROR for output in (*ones, *others))
    return sum(
        one.token_ids != other.token_ids
        or one.logprobs != other.logprobs
        or one.top_logprobs != other.top_logprobs
        or one.prompt_logprobs != other.prompt_logprobs
        or one.prompt_top_logprobs != other.prompt_top_logprobs
        or one.finish_reason != other.finish_reason
        for one, other in zip(ones, others, strict=True)
    )


def alone(model: Any, cases: Sequence[Case]) -> list[Output]:
    """The plainest way: one request at a time, whole, nothing shared."""
    engine = engine_for(model, cases, Schedule())
    return [output for case in cases for output in engine.generate(list(case.prompt), case.sampling)]


def crowd(model: Any, cases: Sequence[Case], draw: Any) -> int:
    together = engine_for(model, cases, Schedule()).generate(
        [list(case.prompt) for case in cases], [case.sampling for case in cases]
    )
    return differing(together, alone(model, cases))


def compared(model: Any, cases: Sequence[Case], schedule: Schedule) -> int:
    """One schedule against the plain one, in which all come at once, whole."""
    plain = serve(engine_for(model, cases, Schedule()), cases, Schedule())
    return differing(serve(engine_for(model, cases, schedule), cases, schedule), plain)


def chunks(model: Any, cases: Sequence[Case], draw: Any) -> int:
    budget = draw(st.integers(0, 40))
    return compared(model, cases, Schedule(max_num_seqs=draw(st.integers(1, 4)), spare_budget=budget))


def pages(model: Any, cases: Sequence[Case], draw: Any) -> int:
    # Another cut as well: page sizes alone move numbers about and never reach the arithmetic.
    return compared(
        model, cases, Schedule(block_size=draw(st.sampled_from([1, 3, 7, 32, 100])), spare_budget=9)
    )


def rounds(model: Any, cases: Sequence[Case], draw: Any) -> int:
    # Only requests that ask for a temperature alone run ahead; some end in the middle of it.
    cases = [
        Case(
            case.prompt,
            SamplingParams(
                temperature=case.sampling.temperature,
                seed=case.sampling.seed,
                max_tokens=2 * case.sampling.max_tokens,
                stop_token_ids=case.sampling.stop_token_ids,
                n=case.sampling.n,
            ),
        )
        for case in cases
    ]
    several = Schedule(
        decode_rounds=draw(st.integers(2, 9)), max_num_seqs=draw(st.sampled_from([3, 16])), caching=True
    )
    return compared(model, cases, several)


def arrivals(model: Any, cases: Sequence[Case], draw: Any) -> int:
    schedule = Schedule(order=draw(st.integers(1, 1000)), gap=draw(st.integers(0, 3)), max_num_seqs=3)
    return compared(model, cases, schedule)


# Two that grow to as many tokens as there is room for one: whatever else is drawn, one of these gives way.
RIVALS = [Case((1, 2, seed), SamplingParams(max_tokens=40, min_tokens=40, seed=seed)) for seed in (3, 4)]


def preempted(model: Any, cases: Sequence[Case], draw: Any) -> int:
    schedule, wrong = Schedule(block_size=4, tight=True, spare_budget=draw(st.integers(0, 60))), 0
    for some in (cases, RIVALS):
        engine = engine_for(model, some, schedule)
        pressed = serve(engine, some, schedule)
        preempted.seen += engine.metrics().preemptions  # type: ignore[attr-defined]
        wrong += differing(pressed, serve(engine_for(model, some, Schedule()), some, Schedule()))
    return wrong


def cached(model: Any, cases: Sequence[Case], draw: Any) -> int:
    schedule = Schedule(block_size=draw(st.sampled_from([2, 8])), caching=True)
    engine = engine_for(model, cases, schedule)
    cold, warm = serve(engine, cases, schedule), serve(engine, cases, schedule)
    cached.seen += sum(output.cached_tokens or 0 for output in warm)  # type: ignore[attr-defined]
    plain = serve(engine_for(model, cases, Schedule()), cases, Schedule())
    return differing(cold, plain) + differing(warm, plain)


def streamed(model: Any, cases: Sequence[Case], draw: Any) -> int:
    engine = engine_for(model, cases, Schedule())
    whole = engine.generate([list(case.prompt) for case in cases], [case.sampling for case in cases])
    found = []
    # Three at a time: a step of one is a step of the others as well.
    with EngineLoop(engine) as loop:
        for group in batched(cases, 3):
            requests = [loop.submit(list(case.prompt), case.sampling) for case in group]
            for pieces in map(list, requests):
                indices = sorted({piece.sample_index for piece in pieces})
                found += [[piece for piece in pieces if piece.sample_index == index] for index in indices]
    wrong = differing([pieces[-1].output for pieces in found], whole)
    for pieces, output in zip(found, whole, strict=True):
        tokens = tuple(token for piece in pieces for token in piece.token_ids)
        logprobs = tuple(value for piece in pieces for value in piece.logprobs)
        wrong += (tokens, logprobs) != (output.token_ids, output.logprobs)
    return wrong


def batched(cases: Sequence[Case], size: int) -> list[Sequence[Case]]:
    return [cases[begin : begin + size] for begin in range(0, len(cases), size)]


def trained(model: Any, cases: Sequence[Case], draw: Any) -> int:
    """Decoded = the trainer's packed forward with gradients = prefilled as a prompt."""
    budget = draw(st.integers(0, 40))
    outputs = serve(engine_for(model, cases, schedule := Schedule(spare_budget=budget)), cases, schedule)
    found = zd.exact.token_logprobs(model, outputs)
    assert all(logprobs.requires_grad for logprobs in found)
    wrong = sum(
        not torch.equal(logprobs.detach(), torch.tensor(output.logprobs))
        for logprobs, output in zip(found, outputs, strict=True)
    )
    raw = [dataclasses.replace(case, sampling=SamplingParams(seed=1, max_tokens=9)) for case in cases]
    decoded = serve(engine_for(model, raw, schedule), raw, schedule)
    scoring = Engine(model, max_num_batched_tokens=256 + budget, logprob_check_interval=0)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = scoring.generate([list(output.sequence) for output in decoded], asked)
    return wrong + sum(
        prefilled.prompt_logprobs[len(output.prompt_token_ids) :] != output.logprobs
        for prefilled, output in zip(scored, decoded, strict=True)
    )


def threaded(model: Any, cases: Sequence[Case], draw: Any) -> int:
    """Two threads share out rows, and one does them all."""
    # Whole prompts in one step: fewer than 32,768 elements are not worth a second thread to torch.
    schedule, found = Schedule(max_num_seqs=draw(st.integers(8, 16))), []
    before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(serve(engine_for(model, cases, schedule), cases, schedule))
    finally:
        torch.set_num_threads(before)
    return differing(*found)


def swapped(model: Any, cases: Sequence[Case], draw: Any) -> int:
    """After any sequence of swaps, every token is what a trainer with the recorded weights says."""
    versions = {name: model if name == "0" else other_weights(model, int(name)) for name in ("0", "1", "2")}
    schedule = Schedule(block_size=4, caching=True, spare_budget=20)
    engine = engine_for(model, cases, schedule)
    for case in cases:
        engine.add_request(list(case.prompt), case.sampling)
    outputs: list[Output] = []
    while engine.has_unfinished:
        for _ in range(draw(st.integers(1, 4))):
            outputs += ended(engine.step())
        name = draw(st.sampled_from(sorted(versions)))
        engine.swap_weights(versions[name].state_dict(), name)
    wrong = 0
    for output in outputs:
        for span in output.versions:
            label = "0" if span.version.label == "initial" else span.version.label
            (found,) = zd.exact.token_logprobs(versions[label], [output])
            wrong += found.tolist()[span.start : span.end] != list(output.logprobs[span.start : span.end])
            swapped.seen += span.end < len(output.token_ids)  # type: ignore[attr-defined]
    return wrong


@cache
def other_weights(model: Any, seed: int) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    return other


THEOREMS: dict[str, Callable[[Any, Sequence[Case], Any], int]] = {
    "batch 1 = batch N": crowd,
    "any chunking = whole": chunks,
    "decode = prefill = trainer": trained,
    "cache hit = miss": cached,
    "preempted = not": preempted,
    "page sizes": pages,
    "several rounds per step = one": rounds,
    "arrival orders": arrivals,
    "streaming = not": streamed,
    "thread counts": threaded,
    "after any sequence of swaps": swapped,
}
for _theorem in (cached, preempted, swapped):
    _theorem.seen = 0  # type: ignore[attr-defined]


def counterexample(theorem: str, examples: int, model: Callable[[str, int], Any]) -> str | None:
    """What differs in the first of `examples` draws, of eight to sixteen requests each, in which something does.

    Told in our own words: Hypothesis prints every parameter of every request, which under coverage takes minutes.
    """
    found: list[str] = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        # Anew each time: a theorem has no bad luck, and the one set of draws that CI would repeat takes 147 s of swaps.
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.sampled_from(FAMILIES), st.integers(0, MODELS - 1), CASES, st.data())
    def tried(family: str, seed: int, cases: list[Case], data: st.DataObject) -> None:
        if found:
            return
        if wrong := THEOREMS[theorem](model(family, seed), cases, data.draw):
            found.append(
                f"{wrong} differ on {family} {seed} of {[msgspec.json.encode(case) for case in cases]}"
            )

    tried()
    return found[0] if found else None


# Six draws of twelve requests on average for each of ten theorems: seven hundred cases, and twelve thousand in the long
# profile.
@pytest.mark.parametrize("examples", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("theorem", THEOREMS)
def test_theorem(theorem: str, examples: int) -> None:
    assert counterexample(theorem, examples, model_of) is None
    assert getattr(THEOREMS[theorem], "seen", 1) > 0, "what the theorem is about never happened"


# Who runs beside a request changes the rows of a matmul, and MKL sums one row in another order than four. How a
# request is cut changes the queries of its attention, and SDPA sums one in another order than many. Threads cut a
# tensor at other places, and torch's silu takes another formula for what is left over by the vector width.
BROKEN_BY = {
    "batch 1 = batch N": "linear",
    "several rounds per step = one": "linear",
    "arrival orders": "linear",
    "streaming = not": "linear",
    "thread counts": "activation",
}


# Threads last, a minute on two cores: up to a hundred draws until what silu leaves over has other bits.
SLOW = "thread counts"


@pytest.mark.parametrize(
    "theorem",
    [*(each for each in THEOREMS if each != SLOW), pytest.param(SLOW, marks=pytest.mark.long)],
)
def test_a_theorem_fails_with_one_op_as_torch_has_it(theorem: str) -> None:
    plain = BROKEN_BY.get(theorem, "attention")
    # The first draw that differs ends it. Ten were not enough once: only what silu leaves over, 15 elements at most, can differ.
    assert counterexample(theorem, 100, lambda family, seed: model_of(family, seed, plain)) is not None
