"""Predictions against numbers worked out by hand, on a chain of four tokens whose probabilities are powers of two."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from zerodrift.audit.counterfactual.evaluate import EXCLUDED_LOGPROB, CaseWindow, Evaluator, in_force
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Pick, Reported
from zerodrift.core.request import SamplingParams

# What follows token 0, 1, 2, 3.
P = np.array([[8, 4, 2, 2], [2, 8, 4, 2], [2, 2, 8, 4], [1, 1, 2, 12]]) / 16
HOT = SamplingParams(temperature=0.5)
"""Squares every probability before it is normalised."""


def log(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities))


def case(
    output: tuple[int, ...] = (1, 2, 2),
    requested: SamplingParams = HOT,
    prompt: tuple[int, ...] = (3, 0),
    **fields: Any,
) -> CaseWindow:
    size = len(output)
    return CaseWindow(prompt, output, requested, np.full(size, -1.0), np.full(size, 1e-6), **fields)


@pytest.fixture
def make(chain):
    def build(*cases, **options):
        forwards = {VANILLA: chain(np.log(P)), "other": chain(np.log(P[::-1]))}
        return Evaluator(cases or (case(),), forwards, **options)

    return build


# (3, 0) | 1, 2, 2: the rows that predict are those of 0, 1, 2. At temperature ½ they are squares, normalised.
RAW = log(4 / 16, 4 / 16, 8 / 16)
SQUARED = log(16 / 88, 16 / 88, 64 / 88)


def test_a_healthy_account_is_the_requested_distribution(make):
    prediction = make().predict(Explanation())
    assert_allclose(prediction.reported, SQUARED, atol=1e-6)
    assert_allclose(prediction.sampled, SQUARED, atol=1e-6)


def test_entropy_and_variance_are_those_of_the_drawn_distribution(make):
    surprise = make().surprise(Explanation())
    p = np.array([64, 16, 4, 4]) / 88
    entropy = -(p * np.log(p)).sum()
    assert_allclose(surprise.entropy[0], entropy, rtol=1e-5)
    assert_allclose(surprise.variance[0], (p * (np.log(p) + entropy) ** 2).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("account", "reported", "sampled"),
    [
        (Explanation(reported=Reported.RAW), RAW, SQUARED),
        (Explanation(sampling={"temperature": 1.0}), RAW, RAW),
        # The sampler did something else, and the numbers hide it.
        (Explanation(sampling={"temperature": 1.0}, reported=Reported.AS_REQUESTED), SQUARED, RAW),
        (Explanation(sampling={"temperature": 1.0}, reported=Reported.RAW), RAW, RAW),
        # Two tokens are kept of 64 : 16 : 4 : 4, in each of the three rows.
        (Explanation(sampling={"top_k": 2}), log(16 / 80, 16 / 80, 64 / 80), log(16 / 80, 16 / 80, 64 / 80)),
        (
            Explanation(sampling={"top_k": 2}, reported=Reported.UNRENORMALISED),
            SQUARED,
            log(16 / 80, 16 / 80, 64 / 80),
        ),
        # e^bias = 2 on token 2 doubles its weight before the temperature squares it: 4 becomes 16, 16 becomes 64.
        (
            Explanation(bias={2: float(np.log(2))}),
            log(16 / 100, 64 / 136, 256 / 280),
            log(16 / 100, 64 / 136, 256 / 280),
        ),
    ],
)
def test_an_account_says_what_is_reported_and_what_was_drawn(make, account, reported, sampled):
    prediction = make().predict(account)
    assert_allclose(prediction.reported, reported, atol=1e-6)
    assert_allclose(prediction.sampled, sampled, atol=1e-6)


NAN = float("nan")


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (Pick.SAMPLED, [4, 4, 8]),
        # Token i in the row of token i+1: 1 in row 1, 2 in row 2; nothing follows the last.
        (Pick.NEXT_ROW, [8, 8, NAN]),
        # Token i in the row of token i-1: 2 in row 0, 2 in row 1; nothing comes before the first.
        (Pick.PREVIOUS_ROW, [NAN, 2, 4]),
        (Pick.PREVIOUS_VALUE, [NAN, 4, 4]),
        (Pick.NEXT_VALUE, [4, 8, NAN]),
        (Pick.TOP, [8, 8, 8]),
        (Pick.NO_STOP, [4, 4, 8]),
    ],
)
def test_every_pick_reads_its_own_entry(make, pick, expected):
    raw = SamplingParams()
    prediction = make(case(requested=raw)).predict(Explanation(pick=pick))
    assert_allclose(prediction.reported, np.log(np.array(expected) / 16), atol=1e-6)
    # What is read does not change what was drawn.
    assert_allclose(prediction.sampled, RAW, atol=1e-6)


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (Pick.NEXT_ROW, [8, NAN, 12, NAN]),
        (Pick.PREVIOUS_ROW, [NAN, 2, NAN, 1]),
        (Pick.NEXT_VALUE, [4, NAN, 1, NAN]),
        (Pick.PREVIOUS_VALUE, [NAN, 4, NAN, 12]),
    ],
)
def test_a_shifted_reading_does_not_leave_its_sequence(make, pick, expected):
    raw = SamplingParams()
    # (3, 0) | 1, 2 and (3,) | 3, 0: rows 0, 1 and rows 3, 3. Two groups of parameters, so that flat indices matter.
    other = SamplingParams(max_tokens=7)
    evaluator = make(case((1, 2), raw), case((3, 0), other, prompt=(3,)))
    assert_allclose(
        evaluator.predict(Explanation(pick=pick)).reported, np.log(np.array(expected) / 16), atol=1e-6
    )


def test_the_stop_token_of_a_stopped_output_may_carry_nothing(make):
    raw = SamplingParams()
    evaluator = make(case((1, 2), raw, stopped=True), case((1, 2), raw))
    assert_allclose(
        evaluator.predict(Explanation(pick=Pick.NO_STOP)).reported,
        [*log(0.25), 0.0, *log(0.25, 0.25)],
        atol=1e-6,
    )


def test_first_tokens_that_carry_one_number_carry_a_placeholder(make):
    raw = SamplingParams()

    def told(*firsts):
        cases = [case((1, 2), raw)._replace(reported=np.array([first, -1.0])) for first in firsts]
        values: list[float] = make(*cases).predict(Explanation(pick=Pick.NO_FIRST)).reported.tolist()
        return values[::2]

    assert told(0.0, 0.0, 0.0) == [0.0] * 3
    assert told(-1.0, -1.0, -1.0) == [-1.0] * 3
    # Two may agree by chance, and others do not agree.
    assert told(0.0, 0.0) == pytest.approx([np.log(0.25)] * 2)
    assert told(0.0, 0.0, -0.5) == pytest.approx([np.log(0.25)] * 3)
    # A window that begins later has no first token.
    later = case((1, 2), raw)._replace(before=1, reported=np.array([0.0]), sigma=np.array([1e-6]))
    assert make(later, later, later).predict(Explanation(pick=Pick.NO_FIRST)).reported == pytest.approx(
        [np.log(0.25)] * 3
    )


def test_a_report_over_the_likeliest_leaves_what_is_drawn(make):
    raw = SamplingParams()
    account = Explanation(sampling={"top_k": 2}, reported=Reported.OVER_LIKELIEST)
    prediction = make(case(requested=raw)).predict(account)
    assert_allclose(prediction.sampled, RAW, atol=1e-6)
    mass = np.array([np.sort(P[row])[-2:].sum() for row in (0, 1, 2)])
    assert_allclose(prediction.reported, RAW - np.log(mass), atol=1e-6)


def test_an_excluded_token_is_as_bad_as_a_prediction_can_be(make):
    evaluator, account = make(), Explanation(sampling={"top_k": 1})
    prediction, surprise = evaluator.predict(account), evaluator.surprise(account)
    assert prediction.reported.tolist() == [EXCLUDED_LOGPROB, EXCLUDED_LOGPROB, 0.0]
    assert prediction.sampled.tolist() == [EXCLUDED_LOGPROB, EXCLUDED_LOGPROB, 0.0]
    assert surprise.entropy.tolist() == surprise.variance.tolist() == [0.0, 0.0, 0.0]


def test_another_context_changes_what_the_first_token_looks_back_on(make):
    evaluator = make(case(requested=SamplingParams()), contexts={"cut": lambda ids: ids[:-1]})
    # Row 3 in place of row 0 predicts the first token.
    assert_allclose(
        evaluator.predict(Explanation(context="cut")).reported, log(1 / 16, 4 / 16, 8 / 16), atol=1e-6
    )


def test_another_forward_gives_other_rows(make):
    evaluator = make(case(requested=SamplingParams()))
    assert_allclose(
        evaluator.predict(Explanation(forward="other")).reported, log(1 / 16, 8 / 16, 4 / 16), atol=1e-6
    )


def test_rows_are_computed_once_for_each_context_and_forward(chain):
    forward = chain(np.log(P))
    evaluator = Evaluator([case()], {VANILLA: forward}, contexts={"cut": lambda ids: ids[:-1]})
    for temperature in (0.3, 0.4, 0.6):
        evaluator.predict(Explanation(sampling={"temperature": temperature}))
    assert forward.calls == 1
    evaluator.predict(Explanation(context="cut"))
    assert forward.calls == 2


def test_numbers_that_hide_the_sampler_are_kept_and_still_right(make):
    evaluator = make()
    for _ in range(2):
        for reported, told in ((Reported.AS_REQUESTED, SQUARED), (Reported.RAW, RAW)):
            for temperature, drawn in ((1.0, RAW), (0.5, SQUARED)):
                account = Explanation(sampling={"temperature": temperature}, reported=reported)
                prediction = evaluator.predict(account)
                assert_allclose(prediction.reported, told, atol=1e-6)
                assert_allclose(prediction.sampled, drawn, atol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "logits"),
    [
        # Row 2 predicts the third token; 3 and 0 stand in the prompt, 1 and 2 in the output.
        ({"repetition_penalty": 2.0}, 2 * np.log(P[2])),
        ({"presence_penalty": 0.5}, np.log(P[2]) - [0, 0.5, 0.5, 0]),
        ({"frequency_penalty": 0.5}, np.log(P[2]) - [0, 0.5, 0.5, 0]),
    ],
)
def test_penalties_count_what_came_before(make, sampling, logits):
    evaluator = make(case(requested=SamplingParams()))
    prediction = evaluator.predict(Explanation(sampling=sampling))
    assert_allclose(prediction.reported[2], logits[2] - np.log(np.exp(logits).sum()), rtol=1e-5)
    # Counting is done once; a second strength must not be scored with the first one's numbers.
    again = evaluator.predict(Explanation(sampling={name: value / 2 for name, value in sampling.items()}))
    assert again.reported[2] != prediction.reported[2]


def test_stop_tokens_cannot_come_before_the_minimum(make):
    evaluator = make(case(requested=SamplingParams(min_tokens=1)), stop_ids=(0,))
    # 8 of 16 are forbidden to the first token, and the others share what is left.
    assert_allclose(evaluator.predict(Explanation()).reported, log(4 / 8, 4 / 16, 8 / 16), atol=1e-6)


def test_cases_with_other_parameters_keep_their_own(make):
    evaluator = make(case((1,), HOT), case((1,), SamplingParams()), case((1,), HOT))
    assert_allclose(evaluator.predict(Explanation()).reported, log(16 / 88, 4 / 16, 16 / 88), atol=1e-6)
    assert evaluator.case_ids.tolist() == [0, 1, 2]


def test_coarser_rounding_widens_the_scale_and_moves_nothing(make):
    asked = []

    def coarse(cases):
        asked.append(len(cases))
        return np.array([0.0, 3e-6, 4e-6])

    evaluator = make(case(), roundings={"bfloat16": coarse})
    account = Explanation(rounding="bfloat16")
    for _ in range(2):
        assert_allclose(evaluator.scale(account), np.hypot(1e-6, [0.0, 3e-6, 4e-6]))
    assert asked == [1]
    assert_allclose(evaluator.scale(Explanation()), 1e-6)
    assert_allclose(evaluator.predict(account).reported, evaluator.predict(Explanation()).reported)


def test_what_is_in_force_is_what_was_requested_and_the_changes():
    requested = SamplingParams(temperature=0.7, logit_bias={1: 0.5}, top_p=0.9)
    assert in_force(Explanation(), requested) is requested
    changed = in_force(Explanation(sampling={"top_p": 0.8}, bias={1: 1.0, 2: -1.0}), requested)
    assert changed.temperature == 0.7
    assert changed.top_p == 0.8
    assert changed.logit_bias == {1: 1.5, 2: -1.0}


def test_truncation_that_a_greedy_request_never_meets():
    greedy = SamplingParams(temperature=0)
    assert in_force(Explanation(sampling={"top_p": 0.8, "top_k": 3}), greedy) == greedy
    assert in_force(Explanation(sampling={"top_p": 0.8, "temperature": 0.5}), greedy).top_p == 0.8


# --- windows ----------------------------------------------------------------------------------------------------

LONG = (1, 2, 2, 3, 1, 0, 2)


def window(begin: int, end: int, requested: SamplingParams = HOT) -> CaseWindow:
    whole = case(LONG[:end], requested)
    return whole._replace(reported=whole.reported[begin:], sigma=whole.sigma[begin:], before=begin)


@pytest.mark.parametrize(
    ("account", "requested"),
    [
        (Explanation(), HOT),
        (Explanation(forward="other", reported=Reported.RAW), HOT),
        (Explanation(), SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)),
        (Explanation(context="longer"), HOT),
        (Explanation(pick=Pick.TOP), HOT),
    ],
)
def test_a_window_is_predicted_as_the_same_tokens_of_the_whole(make, account, requested):
    """Penalties count what came before it, and the forward sees it."""
    contexts = {"longer": lambda ids: (2, *ids)}
    whole = make(case(LONG, requested), contexts=contexts).predict(account)
    part = make(window(2, 5, requested), case(requested=requested), contexts=contexts).predict(account)
    assert_allclose(part.reported[:3], whole.reported[2:5], atol=1e-6)
    assert_allclose(part.sampled[:3], whole.sampled[2:5], atol=1e-6)


def test_a_neighbours_number_is_unknown_at_the_edges_of_a_window(make):
    whole = make(case(LONG)).predict(Explanation(pick=Pick.PREVIOUS_VALUE)).reported
    part = make(window(2, 5)).predict(Explanation(pick=Pick.PREVIOUS_VALUE)).reported
    assert np.isnan(part[0])
    assert_allclose(part[1:], whole[3:5], atol=1e-6)


def test_rows_stand_where_their_windows_do(make):
    evaluator = make(window(2, 5), case(), contexts={"longer": lambda ids: (2, *ids)})
    # Two tokens of prompt: row 1 predicts the first of the output.
    assert evaluator.positions().tolist() == [3, 4, 5, 1, 2, 3]
    assert evaluator.positions("longer").tolist() == [4, 5, 6, 2, 3, 4]
    assert evaluator.case_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert evaluator.tokens.tolist() == [2, 3, 1, 1, 2, 2]
