"""The reference gives a token one number, however the token is reached.

1. Scoring alone == in a padded batch == in chunks over a KV cache.
2. Generating alone == in a batch == in another order.
3. The logprob reported while generating == the logprob of scoring afterwards.

By transitivity a token's logprob does not depend on its neighbours, on chunks or on the cache: to 1e-12, in fp64, on
every built-in model. Checks take what they check, so that planted bugs meet the very same ones.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, LogitRows, Teacher
from zerodrift.core.completion import Answer, Completion, LogprobKind
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.testbed_config import CONFIGS, EOS_ID, VOCAB_SIZE
from zerodrift.sampler.processing import histories, processed_logprobs

EXACT = 1e-12
# The shortest, around chunks of 16 and around the window of 64, and well beyond it.
LENGTHS = (2, 3, 16, 17, 64, 66, 110)

Generate = Callable[[Sequence[Request]], list[Answer]]


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(4, VOCAB_SIZE), k=length))


SEQUENCES = [ids(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=list(CONFIGS))
def reference(request: pytest.FixtureRequest) -> ReferenceBackend:
    return ReferenceBackend(f"testbed:{request.param}", batch=5)


@pytest.fixture(scope="module")
def other(reference: ReferenceBackend) -> Any:
    """The same architecture under weights that moved a little, as after a training step."""
    model = copy.deepcopy(reference.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 0.5
            parameter.add_(noise * 0.02 * parameter.std())
    return model


def largest_gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Over all tokens of all sequences, which must be equally many."""
    return max(
        abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


# --- 1. scoring -------------------------------------------------------------------------------------------------


def check_scoring(teacher: Teacher, plain: Sequence[Sequence[float]]) -> None:
    """`teacher` scores as plain scoring does: in this order and the other, with any neighbours."""
    assert largest_gap(teacher.score(SEQUENCES), plain) <= EXACT
    assert largest_gap(teacher.score(SEQUENCES[4::-1]), plain[4::-1]) <= EXACT


@pytest.fixture(scope="module")
def plain(reference: ReferenceBackend) -> list[list[float]]:
    scores = Teacher(reference.model).score(SEQUENCES)
    assert [len(row) for row in scores] == [length - 1 for length in LENGTHS]
    return scores


@pytest.mark.parametrize(
    "options",
    [
        {"layout": Layout.PADDED, "batch": 4},
        {"layout": Layout.PADDED, "batch": 32},
        {"layout": Layout.CHUNKED, "chunk": 16},
        {"layout": Layout.CHUNKED, "chunk": 23},
    ],
    ids=str,
)
def test_scoring_does_not_depend_on_layout(
    reference: ReferenceBackend, plain: list[list[float]], options: dict[str, Any]
) -> None:
    check_scoring(Teacher(reference.model, **options), plain)


@pytest.mark.parametrize(
    "options", [{"layout": Layout.CHUNKED, "chunk": 1}, {"layout": Layout.DECODED}], ids=str
)
def test_scoring_token_by_token_is_scoring_at_once(
    reference: ReferenceBackend, plain: list[list[float]], options: dict[str, Any]
) -> None:
    teacher = Teacher(reference.model, **options)
    assert largest_gap(teacher.score(SEQUENCES[:4]), plain[:4]) <= EXACT


def test_the_reference_scores_so_too(reference: ReferenceBackend, plain: list[list[float]]) -> None:
    assert largest_gap(reference.score(SEQUENCES), plain) <= EXACT


@pytest.mark.parametrize("layout", Layout)
def test_rows_are_those_that_were_asked_for(
    reference: ReferenceBackend, plain: list[list[float]], layout: Layout
) -> None:
    """Every sequence from its own start on."""
    starts = [max(1, len(sequence) - 9 - seed) for seed, sequence in enumerate(SEQUENCES)]
    rows = list(Teacher(reference.model, layout=layout).logits(SEQUENCES, starts))
    found = [
        logits_TV.log_softmax(-1)[torch.arange(len(logits_TV)), torch.tensor(sequence[start:])].tolist()
        for logits_TV, sequence, start in zip(rows, SEQUENCES, starts, strict=True)
    ]
    expected = [row[start - 1 :] for row, start in zip(plain, starts, strict=True)]
    assert largest_gap(found, expected) <= EXACT


class ForgetsItsCache(Teacher):
    """Every chunk begins anew."""

    def _forward(self, ids_BL: torch.Tensor, model: Any = None, **options: Any) -> Any:
        return super()._forward(ids_BL, model, **{**options, "past_key_values": None})


class OffByOne(Teacher):
    """The row of the token itself in place of the row before it."""

    def logit_rows(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[LogitRows]:
        for piece in super().logit_rows(sequences, starts):
            yield piece._replace(logits_TV=piece.logits_TV.roll(-1, dims=0))


class LooksAtPadding(Teacher):
    """Padding on the left that nobody masks."""

    def _forward(self, ids_BL: torch.Tensor, model: Any = None, **options: Any) -> Any:
        options.pop("attention_mask", None)
        padded_BL = torch.cat([torch.zeros(len(ids_BL), 1, dtype=torch.long), ids_BL], dim=-1)
        return super()._forward(padded_BL, model, **options)


@pytest.mark.parametrize(
    "build",
    [
        lambda model: Teacher(copy.deepcopy(model).float(), layout=Layout.PADDED),
        lambda model: Teacher(model, attention="eager"),  # its softmax is in fp32, whatever the model is in
        lambda model: ForgetsItsCache(model, layout=Layout.CHUNKED),
        OffByOne,
        lambda model: LooksAtPadding(model, layout=Layout.PADDED),
    ],
    ids=["fp32", "eager", "cache", "off-by-one", "padding"],
)
def test_planted_bugs_in_scoring_are_seen(build: Callable[[Any], Teacher]) -> None:
    model = ReferenceBackend("testbed:mistral").model
    with pytest.raises(AssertionError):
        check_scoring(build(model), Teacher(model).score(SEQUENCES))


def test_a_prefix_written_by_the_same_model_changes_nothing(
    reference: ReferenceBackend, plain: list[list[float]]
) -> None:
    for layout in (Layout.ALONE, Layout.CHUNKED):
        teacher = Teacher(reference.model, layout=layout)
        sequence, expected = SEQUENCES[-1], plain[-1]
        for split in (0, 1, 64, 109, 110):
            logits_TV = teacher.continued(sequence, 1, reference.model, split)
            found = logits_TV.log_softmax(-1)[torch.arange(len(sequence) - 1), torch.tensor(sequence[1:])]
            assert largest_gap([found.tolist()], [expected]) <= EXACT, (layout, split)


def test_a_prefix_written_by_another_model_shows(reference: ReferenceBackend, other: Any) -> None:
    """Rows of the prefix are the other model's own; rows after it are neither model's."""
    sequence, split = SEQUENCES[-1], 60
    mixed_TV = Teacher(reference.model).continued(sequence, 1, other, split)
    new_TV = Teacher(reference.model).continued(sequence, 1, reference.model, 0)
    old_TV = Teacher(other).continued(sequence, 1, other, 0)
    assert (mixed_TV[:split] - old_TV[:split]).abs().max() <= 1e-10
    for alone_TV in (new_TV, old_TV):
        gaps_T = (mixed_TV[split:] - alone_TV[split:]).abs().amax(-1)
        assert gaps_T.min() > 1e-6


# --- 2. generating ----------------------------------------------------------------------------------------------


def requests() -> list[Request]:
    """Prompts from one token to beyond the window, under every kind of parameter."""
    shapes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 8, "n": 2},
        {"min_p": 0.05, "logit_bias": {7: 3.0, 9: -4.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"ignore_eos": True, "logprobs": 3},
        {"min_tokens": 4, "stop_token_ids": (11, 40)},
    ]
    lengths = (1, 2, 9, 20, 61, 5, 70, 33, 12)
    return [
        Request(Prompt(ids(length, 100 + number)), SamplingParams(max_tokens=8, seed=number, **shape))
        for number, (length, shape) in enumerate(zip(lengths, shapes, strict=True))
    ]


def check_same(one: Answer, other: Answer) -> None:
    assert len(one.completions) == len(other.completions)
    for left, right in zip(one.completions, other.completions, strict=True):
        assert left.token_ids == right.token_ids
        assert left.finish_reason is right.finish_reason
        assert left.sample_index == right.sample_index
        assert largest_gap([left.logprobs], [right.logprobs]) <= EXACT
        for mine, theirs in zip(left.top_logprobs, right.top_logprobs, strict=True):
            assert [each.token_id for each in mine] == [each.token_id for each in theirs]
            assert (
                largest_gap([[each.logprob for each in mine]], [[each.logprob for each in theirs]]) <= EXACT
            )


def check_company(generate: Generate, asked: Sequence[Request]) -> None:
    """A request alone, among others, and in another order."""
    alone = [generate([request])[0] for request in asked]
    for order in (list(range(len(asked))), list(range(len(asked)))[3::-1]):
        together = generate([asked[index] for index in order])
        for index, answer in zip(order, together, strict=True):
            check_same(answer, alone[index])


def test_generating_does_not_depend_on_company(reference: ReferenceBackend) -> None:
    check_company(reference.generate, requests())


def test_nor_on_the_size_of_batches(reference: ReferenceBackend) -> None:
    expected = reference.generate(requests())
    resized = copy.copy(reference)
    resized.batch = 64
    for answer, known in zip(resized.generate(requests()), expected, strict=True):
        check_same(answer, known)


def test_planted_bugs_in_generating_are_seen() -> None:
    reference = ReferenceBackend("testbed:llama", batch=5)

    def seeded_by_place(asked: Sequence[Request]) -> list[Answer]:
        moved = [
            msgspec.structs.replace(
                request,
                sampling=msgspec.structs.replace(request.sampling, seed=(request.sampling.seed or 0) + place),
            )
            for place, request in enumerate(asked)
        ]
        return reference.generate(moved)

    def a_hair_off_in_company(asked: Sequence[Request]) -> list[Answer]:
        return [
            msgspec.structs.replace(
                answer,
                completions=tuple(
                    msgspec.structs.replace(
                        each, logprobs=tuple(value - 1e-11 * len(asked) for value in each.logprobs)
                    )
                    for each in answer.completions
                ),
            )
            for answer in reference.generate(asked)
        ]

    for planted in (seeded_by_place, a_hair_off_in_company):
        with pytest.raises(AssertionError):
            check_company(planted, requests()[:4])


# --- 3. generating and scoring ----------------------------------------------------------------------------------


def rescored(teacher: Teacher, completion: Completion, *, raw: bool) -> list[float]:
    """What scoring afterwards says of a completion's tokens."""
    prompt, output = completion.prompt_token_ids, completion.token_ids
    (logits_TV,) = teacher.logits([completion.sequence], [len(prompt)])
    logprobs_TV = (
        logits_TV.log_softmax(-1)
        if raw
        else processed_logprobs(logits_TV, completion.sampling, histories(prompt, output), (EOS_ID,))
    )
    return logprobs_TV[torch.arange(len(output)), torch.tensor(output)].tolist()


@pytest.mark.parametrize("kind", LogprobKind)
def test_reported_logprobs_are_those_of_scoring(reference: ReferenceBackend, kind: LogprobKind) -> None:
    engine = copy.copy(reference)
    engine.kind = kind
    teacher = Teacher(reference.model)
    kinds_differ = False
    for request, answer in zip(requests(), engine.generate(requests()), strict=True):
        assert len(answer.completions) == request.sampling.n
        for completion in answer.completions:
            assert completion.kind is kind
            raw, processed = (rescored(teacher, completion, raw=flag) for flag in (True, False))
            expected = raw if kind is LogprobKind.RAW else processed
            assert largest_gap([completion.logprobs], [expected]) <= EXACT
            kinds_differ |= largest_gap([raw], [processed]) > 0.1
    assert kinds_differ, "no request told raw from processed"


def test_both_kinds_sample_the_same_tokens(reference: ReferenceBackend) -> None:
    engine = copy.copy(reference)
    engine.kind = LogprobKind.RAW
    for one, other in zip(engine.generate(requests()), reference.generate(requests()), strict=True):
        assert [each.token_ids for each in one.completions] == [each.token_ids for each in other.completions]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.0}])
def test_alternatives_are_the_likeliest_tokens(reference: ReferenceBackend, options: dict[str, Any]) -> None:
    request = Request(Prompt(ids(20, 3)), SamplingParams(max_tokens=6, seed=1, logprobs=5, **options))
    (completion,) = reference.generate([request])[0].completions
    (logits_TV,) = Teacher(reference.model).logits([completion.sequence], [20])
    rows = histories(completion.prompt_token_ids, completion.token_ids)
    logprobs_TV = processed_logprobs(logits_TV, request.sampling, rows, (EOS_ID,))
    for row, alternatives in enumerate(completion.top_logprobs):
        kept = int((logprobs_TV[row] > -torch.inf).sum())
        best = logprobs_TV[row].topk(min(5, kept))
        assert [each.token_id for each in alternatives] == best.indices.tolist()
        assert largest_gap([[each.logprob for each in alternatives]], [best.values.tolist()]) <= EXACT
        if completion.token_ids[row] in best.indices:
            own = next(each for each in alternatives if each.token_id == completion.token_ids[row])
            assert own.logprob == completion.logprobs[row]
    assert len(completion.top_logprobs) == len(completion.token_ids)


def test_prompt_logprobs_are_those_of_scoring(reference: ReferenceBackend) -> None:
    asked = [
        Request(Prompt(ids(length, length)), SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0))
        for length in (1, 2, 70)
    ]
    for request, answer in zip(asked, reference.generate(asked), strict=True):
        (completion,) = answer.completions
        first, *others = completion.prompt_logprobs
        assert first is None
        assert len(others) == len(request.prompt.token_ids) - 1
        if others:
            (expected,) = Teacher(reference.model).score([request.prompt.token_ids])
            assert largest_gap([others], [expected]) <= EXACT
