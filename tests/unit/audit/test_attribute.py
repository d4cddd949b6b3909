"""Attribution on a chain whose engine is played by numpy: the truth is known, and must be what the data prefers."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from zerodrift.audit.attribute import MAX_CAUSES, MOST_NAMED, Attribution, Costs, attribute
from zerodrift.audit.counterfactual.bias import bias_hypotheses
from zerodrift.audit.counterfactual.evaluate import CaseWindow, Evaluator
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis, Pick, Reported
from zerodrift.audit.counterfactual.semantic import ExpectedSampling, hidden_hypotheses, told_hypotheses
from zerodrift.audit.diagnose import seen_by
from zerodrift.core.request import SamplingParams

Floats = NDArray[np.float64]
WORDS = 24
REQUESTED = SamplingParams(temperature=0.7)
SIGMA = 1e-6
TABLE: Floats = np.random.default_rng(7).normal(0.0, 1.6, (WORDS, WORDS))
"""Logits after each token: about 1.7 nats of entropy at the requested temperature."""


def softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept(p: Floats, top_p: float) -> Floats:
    """The smallest set that reaches `top_p`, renormalised."""
    order = np.argsort(-p)
    count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    left = np.zeros_like(p)
    left[order[:count]] = p[order[:count]]
    return left / left.sum()


class Engine:
    """Draws from one distribution and reports another, as told; written apart from the code under test."""

    def __init__(self, draws: Callable[..., Floats], tells: Callable[..., Floats] | None = None) -> None:
        """Both map (logits, output so far) to probabilities; what is told is what is drawn unless said."""
        self.draws, self.tells = draws, tells or draws

    def cases(self, count: int = 24, length: int = 16, noise: float = 0.0) -> list[CaseWindow]:
        rng = np.random.default_rng(1)
        return [self._case(rng, start % WORDS, length, noise) for start in range(count)]

    def _case(self, rng: np.random.Generator, start: int, length: int, noise: float) -> CaseWindow:
        output: list[int] = []
        told = []
        for _ in range(length):
            logits = TABLE[output[-1] if output else start]
            token = int(rng.choice(WORDS, p=self.draws(logits, output)))
            told.append(np.log(self.tells(logits, output)[token]) + noise * rng.normal())
            output.append(token)
        return CaseWindow((0, start), tuple(output), REQUESTED, np.array(told), np.full(length, SIGMA))


def at(temperature: float, top_p: float = 1.0) -> Callable[..., Floats]:
    return lambda logits, output: kept(softmax(logits / temperature), top_p)


def penalised(presence: float) -> Callable[..., Floats]:
    def draw(logits: Floats, output: Sequence[int]) -> Floats:
        changed = logits.copy()
        changed[list(set(output))] -= presence
        return softmax(changed / 0.7)

    return draw


def biased(tokens: Sequence[int], size: float) -> Callable[..., Floats]:
    def draw(logits: Floats, output: Sequence[int]) -> Floats:
        changed = logits.copy()
        changed[list(tokens)] += size
        return softmax(changed / 0.7)

    return draw


RAW = at(1.0)
ASKED = at(0.7)


@pytest.fixture
def judge(chain):
    def run(cases, defaults=None):
        costs = Costs(Evaluator(cases, {VANILLA: chain(TABLE)}))
        expected = ExpectedSampling(REQUESTED.temperature, defaults or {})

        def propose(account):
            if costs.at_floor(account):
                return list(hidden_hypotheses(account, costs.total, expected))
            return [
                *told_hypotheses(account, costs.total, expected),
                *bias_hypotheses(account, seen_by(costs, account), expected.temperature, costs.total),
            ]

        return attribute(costs, propose, np.random.default_rng(0))

    return run


def causes(attribution: Attribution) -> list[str]:
    return [finding.cause for finding in attribution.selected]


@pytest.mark.parametrize("noise", [0.0, SIGMA])
def test_nothing_wrong_finds_nothing(judge, noise):
    attribution = judge(Engine(ASKED).cases(noise=noise))
    assert attribution.selected == ()
    assert attribution.explained_to_floor


@pytest.mark.parametrize(
    ("engine", "cause", "words"),
    [
        (Engine(ASKED, RAW), "semantic/raw-logprobs", "before processing"),
        (Engine(at(0.63)), "semantic/temperature", "temperature=0.63 in force"),
        (Engine(at(0.7, 0.9)), "semantic/truncation-mass", "top_p=0.9 in force"),
        (Engine(at(0.7, 0.9), ASKED), "semantic/sampling-bias", "top_p="),
        (Engine(at(1.0), ASKED), "semantic/sampling-bias", "temperature="),
        (Engine(penalised(0.5)), "semantic/penalty", "presence_penalty=0.5 in force"),
        (Engine(biased((3, 5), 2.0)), "semantic/logit-bias", "a bias of +2 on 2 tokens (3, 5)"),
    ],
)
def test_one_fault_is_named_with_its_value(judge, engine, cause, words):
    attribution = judge(engine.cases())
    assert causes(attribution) == [cause]
    (finding,) = attribution.selected
    assert words in finding.message
    assert attribution.explained_to_floor
    assert finding.interval[0] <= finding.explained <= finding.interval[1]
    assert finding.gain_nats > 12


def test_which_evidence_carried_it_is_said(judge):
    told, hidden = judge(Engine(at(0.63)).cases()), judge(Engine(at(1.0), ASKED).cases())
    assert told.selected[0].channel == "reported"
    assert told.selected[0].explained == pytest.approx(1.0, abs=1e-4)
    assert hidden.selected[0].channel == "sampled"
    assert 0.5 < hidden.selected[0].explained <= 1.0


def test_two_faults_at_once_are_both_named(judge):
    """Raw logprobs hide the truncation: first what is told, then what was drawn."""
    attribution = judge(Engine(at(0.7, 0.8), RAW).cases())
    assert causes(attribution) == ["semantic/raw-logprobs", "semantic/sampling-bias"]
    assert [finding.channel for finding in attribution.selected] == ["reported", "sampled"]
    assert "top_p=0.8" in attribution.selected[1].message


def test_a_shift_of_a_changed_temperature_is_both(judge):
    cases = [case._replace(reported=np.roll(case.reported, 1)) for case in Engine(at(0.5)).cases()]
    assert set(causes(judge(cases))) == {"semantic/off-by-one", "semantic/temperature"}


@pytest.mark.parametrize(("whose", "shift"), [("before", 1), ("after", -1)], ids=["right", "left"])
def test_a_neighbours_number_is_off_by_one(judge, whose, shift):
    cases = [case._replace(reported=np.roll(case.reported, shift)) for case in Engine(ASKED).cases()]
    attribution = judge(cases)
    assert causes(attribution) == ["semantic/off-by-one"]
    assert whose in attribution.selected[0].message


def test_the_defaults_of_the_checkpoint_beat_the_parameter_they_set(judge):
    attribution = judge(Engine(at(0.6, 0.95)).cases(), {"temperature": 0.6, "top_p": 0.95})
    assert causes(attribution) == ["semantic/generation-config"]


def test_what_no_account_explains_is_left_standing(judge):
    rng = np.random.default_rng(3)
    cases = [
        case._replace(reported=case.reported - np.abs(rng.normal(0, 0.5, len(case.reported))))
        for case in Engine(ASKED).cases()
    ]
    attribution = judge(cases)
    assert not attribution.explained_to_floor
    assert attribution.residual_sigmas > 1000
    assert all(finding.explained < 0.5 for finding in attribution.selected)


def test_one_token_each_leaves_nothing_to_shift(judge):
    """Where no output has a second token, off-by-one accounts predict nothing: they lose, and spoil nothing."""
    attribution = judge(Engine(ASKED, RAW).cases(count=300, length=1))
    assert causes(attribution) == ["semantic/raw-logprobs"]
    attribution = judge(Engine(at(0.7, 0.8), RAW).cases(count=300, length=1))
    assert causes(attribution) == ["semantic/raw-logprobs", "semantic/sampling-bias"]


@pytest.mark.parametrize(("wrong", "sure"), [(1, False), (16, True)])
def test_sequences_that_agree_to_the_last_bit(chain, wrong, sure):
    """A resample of nothing but those has no difference to explain: one wrong sequence of many is no certainty."""
    vanilla, other = chain(TABLE), chain(TABLE[::-1].copy())

    def partly(sequences, starts, *_):
        pairs = zip(sequences, vanilla(sequences, starts), other(sequences, starts), strict=True)
        return [theirs if ids[1] < wrong else ours for ids, ours, theirs in pairs]

    forwards = {VANILLA: vanilla, "partly": partly}
    cases = Engine(ASKED).cases()
    told = Evaluator(cases, forwards).predict(Explanation(forward="partly")).reported
    cases = [case._replace(reported=values) for case, values in zip(cases, np.split(told, 24), strict=True)]
    step = Hypothesis("path/rope", "another forward", Explanation(forward="partly"))
    attribution = attribute(Costs(Evaluator(cases, forwards)), lambda _: [step], np.random.default_rng(0))
    (finding,) = attribution.selected
    assert finding.explained == pytest.approx(1.0)
    assert (finding.interval[0] > 0.9) is sure


# --- the share, and how sure it is ------------------------------------------------------------------------------


@pytest.fixture
def half_explained(chain):
    """A step that explains sequences with an even start alone, found on `cases` of which all are wrong."""
    vanilla, other = chain(TABLE), chain(TABLE[::-1].copy())

    def even(sequences, starts, *_):
        pairs = zip(sequences, vanilla(sequences, starts), other(sequences, starts), strict=True)
        return [theirs if ids[1] % 2 == 0 else ours for ids, ours, theirs in pairs]

    forwards = {VANILLA: vanilla, "even": even, "all": other}

    def run(at_random, count=48, wrong="all"):
        cases = Engine(ASKED).cases(count)
        told = Evaluator(cases, forwards).predict(Explanation(forward=wrong)).reported
        cases = [
            case._replace(reported=values, at_random=at_random(number))
            for number, (case, values) in enumerate(zip(cases, np.split(told, count), strict=True))
        ]
        step = Hypothesis("path/rope", "another forward", Explanation(forward="even"))
        attribution = attribute(Costs(Evaluator(cases, forwards)), lambda _: [step], np.random.default_rng(0))
        return attribution.selected[0]

    return run


def test_the_share_is_that_of_sequences_chosen_by_chance(half_explained):
    """The worst were chosen by what is to be explained: here they are all explained, and half of the others."""
    everything = half_explained(lambda number: True)
    assert everything.explained == pytest.approx(0.5, abs=0.1)
    biased = half_explained(lambda number: number % 2 == 1 or number < 24)
    assert biased.sequences == 36
    assert biased.explained == pytest.approx(1 / 3, abs=0.1)
    low, high = biased.interval
    assert low < biased.explained < high
    assert high - low > 0.2


def test_fewer_than_twenty_sequences_have_no_interval(half_explained):
    few, enough = (half_explained(lambda number, count=count: number < count) for count in (19, 20))
    assert (few.sequences, few.interval) == (19, (0.0, 1.0))
    assert few.explained == pytest.approx(0.5, abs=0.15)
    assert enough.sequences == 20
    assert 0.0 < enough.interval[0] < enough.interval[1] < 1.0


def test_one_sequence_is_enough_for_a_share(half_explained):
    only = half_explained(lambda number: True, count=1)
    assert (only.explained, only.interval, only.sequences) == (pytest.approx(1.0), (0.0, 1.0), 1)


def test_a_fault_that_chance_did_not_meet_is_still_found(half_explained):
    """Those chosen by chance show rounding alone, and a share of rounding is none: it is that of the worst."""
    rare = half_explained(lambda number: number % 2 == 1, wrong="even")
    assert (rare.explained, rare.interval, rare.sequences) == (pytest.approx(1.0), (0.0, 1.0), 0)


def test_of_what_the_samples_show_the_share_is_that_of_chance_too(judge):
    cases = Engine(at(1.0), ASKED).cases(count=48)
    half = [case._replace(at_random=number % 2 == 0) for number, case in enumerate(cases)]
    few = [case._replace(at_random=number < 10) for number, case in enumerate(cases)]
    (whole,), (part,), (unsure,) = (judge(each).selected for each in (cases, half, few))
    assert whole.gain_nats == pytest.approx(part.gain_nats), "all tokens guide the search"
    assert whole.explained != part.explained
    assert part.sequences == 24
    assert unsure.interval == (0.0, 1.0)


@pytest.mark.parametrize("steps", [1, MOST_NAMED, MOST_NAMED + 1])
def test_many_changes_that_reach_the_floor_together_are_no_name(stepwise, steps):
    attribution = stepwise(24 // steps, steps)
    assert len(attribution.selected) == steps
    assert attribution.explained_to_floor is (steps <= MOST_NAMED)


def test_one_in_twelve_that_stays_far_off_is_not_the_floor(chain):
    """Nine in ten are explained; what is left carries on what all of them had."""
    cases = [
        case._replace(reported=case.reported + (0.0 if number else 60 * SIGMA))
        for number, case in enumerate(Engine(ASKED).cases(count=12))
    ]
    costs = Costs(Evaluator(cases, {VANILLA: chain(TABLE)}))
    assert costs.at_floor(Explanation())
    assert not costs.leaves_nothing(Explanation())


def test_no_more_causes_than_anyone_would_read(stepwise):
    """Eight steps, each of which explains three sequences more: the fifth is not taken."""
    attribution = stepwise(3, 8)
    assert [finding.message for finding in attribution.selected] == [
        f"step {n}" for n in range(1, MAX_CAUSES + 1)
    ]
    assert not attribution.explained_to_floor


@pytest.fixture
def stepwise(chain):
    """A difference that is explained in steps, so many sequences each."""
    vanilla, other = chain(TABLE), chain(TABLE[::-1].copy())

    def run(each, steps):
        def first(count):
            def forward(sequences, starts, *_):
                pairs = zip(sequences, vanilla(sequences, starts), other(sequences, starts), strict=True)
                return [theirs if ids[1] < each * count else ours for ids, ours, theirs in pairs]

            return forward

        forwards = {VANILLA: vanilla, **{f"step-{count}": first(count) for count in range(1, steps + 1)}}
        cases = Engine(ASKED).cases()
        told = Evaluator(cases, forwards).predict(Explanation(forward=f"step-{steps}")).reported
        cases = [case._replace(reported=told[16 * n : 16 * n + 16]) for n, case in enumerate(cases)]

        def propose(account):
            count = 1 if account.forward == VANILLA else int(account.forward[-1]) + 1
            if count > steps:
                return []
            return [Hypothesis("path/rope", f"step {count}", Explanation(forward=f"step-{count}"))]

        return attribute(Costs(Evaluator(cases, forwards)), propose, np.random.default_rng(0))

    return run


def test_coarser_rounding_is_found_by_its_size_alone(chain):
    cases = Engine(ASKED).cases(noise=1e-2)
    evaluator = Evaluator(
        cases, {VANILLA: chain(TABLE)}, roundings={"bfloat16": lambda cases: np.full(24 * 16, 1e-2)}
    )
    step = Hypothesis("path/body-precision", "bf16", Explanation(rounding="bfloat16"), 1)
    attribution = attribute(Costs(evaluator), lambda _: [step], np.random.default_rng(0))
    assert [finding.channel for finding in attribution.selected] == ["size"]
    assert attribution.selected[0].explained > 0.9
    assert attribution.explained_to_floor


def test_a_change_must_pay_for_itself(chain):
    """A fault in one token of hundreds is worth less than the price of a name."""
    cases = Engine(ASKED).cases()
    cases[0].reported[0] -= 5e-6
    costs = Costs(Evaluator(cases, {VANILLA: chain(TABLE)}))
    step = Hypothesis("semantic/raw-logprobs", "x", Explanation(reported=Reported.RAW))
    assert attribute(costs, lambda _: [step], np.random.default_rng(0)).selected == ()
    assert attribute(costs, lambda _: [], np.random.default_rng(0)).selected == ()


def test_costs_ask_the_evaluator_once_per_account(chain):
    evaluator = Evaluator(Engine(ASKED).cases(count=2), {VANILLA: chain(TABLE)})
    costs = Costs(evaluator)
    first = costs.prediction(Explanation(sampling={"temperature": 0.9}))
    assert costs.prediction(Explanation(sampling={"temperature": 0.9})) is first
    assert costs.prediction(Explanation(sampling={"temperature": 0.8})) is not first


def test_costs_by_hand(chain):
    """Cauchy over what is reported, likelihood over what is drawn; a reading that is silent is charged the average."""
    (case,) = Engine(ASKED).cases(count=1, length=4)
    off = case._replace(reported=case.reported + np.array([0, SIGMA, 0, 0]))
    costs = Costs(Evaluator([off], {VANILLA: chain(TABLE)}))
    channels = costs.channels(Explanation())
    assert channels.reported == pytest.approx(np.log(2), abs=0.2)
    assert channels.sampled == pytest.approx(-case.reported.sum(), abs=1e-4)
    assert costs.total(Explanation()) == pytest.approx(sum(channels))
    shifted = Explanation(pick=Pick.NEXT_VALUE)
    known = np.log1p((costs.residual(shifted)[:3] / SIGMA) ** 2)
    assert costs.channels(shifted).reported == pytest.approx(known.mean() * 4)


def test_z_is_that_of_the_martingale(chain):
    costs = Costs(Evaluator(Engine(at(0.4), ASKED).cases(), {VANILLA: chain(TABLE)}))
    entropy, variance = costs.evaluator.surprise(Explanation())
    steps = costs.prediction(Explanation()).sampled + entropy
    assert costs.z(Explanation()) == pytest.approx(steps.sum() / np.sqrt(variance.sum()))
    assert costs.z(Explanation()) > 5
    assert abs(costs.z(Explanation(sampling={"temperature": 0.4}))) < 3
