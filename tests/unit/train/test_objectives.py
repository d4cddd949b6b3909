"""Every objective against plain Python in float64: the loss by loops over tokens, the gradient by differences of it."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from zerodrift.config.training import CorrectionName, ObjectiveName, TrainConfig
from zerodrift.train import learner
from zerodrift.train.advantage import leave_one_out, normalised
from zerodrift.train.objectives.base import LossInputs, RatioBounds, Totals
from zerodrift.train.objectives.registry import OBJECTIVES
from zerodrift.train.objectives.terms import correction_weights, entropy, reference_kl

LENGTHS = (3, 1, 7, 2, 5)
ADVANTAGES = (0.7, -1.3, 0.4, -0.2, 0.0)
STEP = 1e-6


def numbers(seed):
    """Log-ratios of 0.3, so that some are clipped on either side; of sequences' means 3e-4 would clip nearly all."""
    rng = random.Random(seed)
    current = [[-rng.random() * 3 for _ in range(length)] for length in LENGTHS]
    old = [[value + rng.gauss(0, 0.3) for value in row] for row in current]
    weight = [[rng.uniform(0.5, 2) for _ in row] for row in current]
    return current, old, weight


def slow_clipped(ratio, advantage, clip):
    bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
    return min(ratio * advantage, bounded * advantage)


def slow_loss(name, current, old, weight, clip):
    """Written from the papers' formulas, without a tensor."""
    tokens, sequences, loss = sum(map(len, current)), len(current), 0.0
    for row, before, factors, advantage in zip(current, old, weight, ADVANTAGES, strict=True):
        ratios = [math.exp(now - then) for now, then in zip(row, before, strict=True)]
        match name:
            case ObjectiveName.REINFORCE_LOO:
                loss -= sum(w * r * advantage for w, r in zip(factors, ratios, strict=True)) / tokens
            case ObjectiveName.PPO_CLIP:
                loss -= (
                    sum(w * slow_clipped(r, advantage, clip) for w, r in zip(factors, ratios, strict=True))
                    / tokens
                )
            case ObjectiveName.GRPO:
                earned = [w * slow_clipped(r, advantage, clip) for w, r in zip(factors, ratios, strict=True)]
                loss -= sum(earned) / len(row) / sequences
            case ObjectiveName.GSPO:
                whole = math.prod(ratios) ** (1 / len(row))
                loss -= sum(factors) / len(row) * slow_clipped(whole, advantage, clip) / sequences
    return loss


def slow_gradient(name, current, old, weight, clip):
    found = []
    for row in current:
        for place, value in enumerate(row):
            row[place] = value + STEP
            above = slow_loss(name, current, old, weight, clip)
            row[place] = value - STEP
            below = slow_loss(name, current, old, weight, clip)
            row[place] = value
            found.append((above - below) / (2 * STEP))
    return found


def flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def inputs_of(current, old, weight, chosen=slice(None)):
    lengths = LENGTHS[chosen]
    return LossInputs(
        flat(current[chosen]).requires_grad_(),
        flat(old[chosen]),
        flat(weight[chosen]),
        torch.tensor(ADVANTAGES[chosen], dtype=torch.float64),
        torch.tensor(lengths),
        Totals(sum(LENGTHS), len(LENGTHS)),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ObjectiveName)
def test_loss_and_gradient(name, seed) -> None:
    objective = OBJECTIVES[name]
    # GSPO's own clip is so narrow that these ratios would leave nothing to differentiate.
    clip = RatioBounds(0.02, 0.03) if name is ObjectiveName.GSPO else objective.clip
    current, old, weight = numbers(seed)
    inputs = inputs_of(current, old, weight)
    found = objective.loss(inputs, clip)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(slow_loss(name, current, old, weight, clip), rel=1e-12)
    slow = torch.tensor(slow_gradient(name, current, old, weight, clip), dtype=torch.float64)
    torch.testing.assert_close(inputs.current.grad, slow, rtol=1e-6, atol=1e-9)
    if name is not ObjectiveName.REINFORCE_LOO:
        cut = (inputs.current.grad == 0) & (inputs.token_advantage != 0)
        assert found.clipped == int(cut.sum()) > 0, "a clip that cuts nothing here would test nothing"


@pytest.mark.parametrize("name", ObjectiveName)
def test_parts_add_up_to_the_whole(name) -> None:
    objective, (current, old, weight) = OBJECTIVES[name], numbers(7)
    whole = objective.loss(inputs_of(current, old, weight), objective.clip)
    parts = [
        objective.loss(inputs_of(current, old, weight, chosen), objective.clip)
        for chosen in (slice(0, 2), slice(2, 5))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sum(part.clipped for part in parts) == whole.clipped


# --- with what is added to it, as a learner takes it ---------------------------------------------------------------------

KL, ENTROPY, CAP = 0.3, 0.2, 1.25
WIDE = RatioBounds(0.02, 0.03)


def slow_weight(correction, before, engine):
    """Of one token: how far the trainer is from the engine."""
    apart = math.exp(before - engine)
    match correction:
        case CorrectionName.NONE:
            return 1.0
        case CorrectionName.TIS:
            return min(apart, CAP)
        case CorrectionName.MIS:
            return apart if 1 / CAP <= apart <= CAP else 0.0


def slow_whole(name, correction, rows):
    """The objective, a KL to the reference and an entropy bonus.

    GRPO as in DeepSeekMath, equation 3: the KL stands inside the mean over each answer's tokens. The bonus counts a token by
    what the current weights say of it over what drew it, as far as the correction lets that through.
    """
    corrected = correction is not CorrectionName.NONE
    olds = rows["before"] if corrected else rows["engine"]
    weights = [
        [slow_weight(correction, then, drawn) for then, drawn in zip(*pair, strict=True)]
        for pair in zip(rows["before"], rows["engine"], strict=True)
    ]
    loss, tokens = slow_loss(name, rows["current"], olds, weights, WIDE), sum(LENGTHS)
    for place, row in enumerate(rows["current"]):
        by_answer = name in (ObjectiveName.GRPO, ObjectiveName.GSPO)
        share = 1 / (len(row) * len(LENGTHS)) if by_answer else 1 / tokens
        for index, now in enumerate(row):
            apart = rows["reference"][place][index] - now
            loss += KL * share * (math.exp(apart) - apart - 1)
            ratio = weights[place][index] * math.exp(now - olds[place][index])
            loss -= ENTROPY * share * ratio * -rows["held"][place][index]
    return loss


class Rows(torch.nn.Module):
    """A model that says these logprobs of sequence 0, 1, 2 and so on."""

    def __init__(self, rows) -> None:
        super().__init__()
        self.flat = torch.nn.Parameter(flat(rows))


def said(model, outputs):
    rows = torch.split(model.flat, list(LENGTHS))
    return [rows[output.place] for output in outputs]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("correction", CorrectionName)
@pytest.mark.parametrize("name", ObjectiveName)
def test_a_step_with_kl_and_entropy(monkeypatch, name, correction, later) -> None:
    """Tokens are stale: the engine's numbers are other weights'. `later`: a second epoch, which began elsewhere."""
    current, engine, _ = numbers(3)
    before, reference = (numbers(3 + add)[1] if add else current for add in (8 * later, 5))
    monkeypatch.setattr(learner, "logprobs_of", said)
    config = TrainConfig(
        objective=name, kl_coef=KL, entropy_coef=ENTROPY, correction=correction, correction_cap=CAP,
        clip_low=WIDE.low, clip_high=WIDE.high, micro_batch_tokens=8,
    )  # fmt: skip
    model = Rows(current)
    batch = [
        learner.WeighedRollout(
            SimpleNamespace(prompt_token_ids=(1,), token_ids=row, logprobs=row, place=place), advantage, True
        )
        for place, (row, advantage) in enumerate(zip(engine, ADVANTAGES, strict=True))
    ]
    old = list(torch.split(flat(before), list(LENGTHS))) if later else None
    found = learner.Learner(model, config, Rows(reference)).gradients(batch, old)
    rows = {
        "current": current, "before": [[*row] for row in before], "engine": engine, "reference": reference,
        "held": [[*row] for row in current],
    }  # fmt: skip
    # What the engine said and advantages are float32.
    assert found.loss == pytest.approx(slow_whole(name, correction, rows), rel=1e-5)
    slow = []
    for row in current:
        for place, value in enumerate(row):
            row[place] = value + STEP
            above = slow_whole(name, correction, rows)
            row[place] = value - STEP
            slow.append((above - slow_whole(name, correction, rows)) / (2 * STEP))
            row[place] = value
    torch.testing.assert_close(model.flat.grad, torch.tensor(slow).double(), rtol=1e-4, atol=1e-6)


def test_reference_kl_against_its_definition() -> None:
    current = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.1, -0.2, -1.0], dtype=torch.float64)
    found = reference_kl(current, reference)
    slow = [math.exp(r - c) - (r - c) - 1 for c, r in zip(current.tolist(), reference.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(slow, dtype=torch.float64))
    found.sum().backward()
    # d/dc (exp(r - c) - r + c - 1) = 1 - exp(r - c)
    torch.testing.assert_close(current.grad, 1 - torch.exp(reference - current.detach()))


@pytest.mark.parametrize("corrected", [False, True])
def test_entropy_has_the_gradient_of_the_entropy_in_expectation(corrected) -> None:
    """Summed over the whole vocabulary, each token counted as often as it is drawn by an old policy."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    behaviour = torch.log_softmax(torch.tensor([0.1, -0.5, 1.0, 0.6], dtype=torch.float64), dim=0)
    current = torch.log_softmax(logits, dim=0)
    ones = torch.ones(4, dtype=torch.float64)
    # With a correction whose cap is far away, the ratio to the engine is the weight's: the same number.
    old, weight = (current.detach(), (current.detach() - behaviour).exp()) if corrected else (behaviour, ones)
    inputs = LossInputs(current, old, weight, ones, torch.ones(4, dtype=torch.int64), Totals(4, 4))
    expected = (behaviour.exp() * entropy(inputs)).sum()
    exact = -(current.exp() * current).sum()
    assert expected.item() == pytest.approx(exact.item(), rel=1e-12)
    (estimated,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (true,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(estimated, true)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (CorrectionName.NONE, [1, 1, 1, 1]),
        (CorrectionName.TIS, [1, 2, 1.5, 0.25]),
        (CorrectionName.MIS, [1, 0, 1.5, 0]),
    ],
)
def test_corrections(name, expected) -> None:
    engine = torch.full((4,), -1.0)
    trainer = engine + torch.tensor([1.0, 4.0, 1.5, 0.25]).log()
    torch.testing.assert_close(correction_weights(name, 2.0, trainer, engine), torch.tensor(expected).float())


@pytest.mark.parametrize("advantages", [leave_one_out, normalised])
def test_advantages_of_equal_rewards_are_zero_to_the_last_bit(advantages) -> None:
    assert advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_advantages_by_hand() -> None:
    assert leave_one_out([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    # mean 1/3, squares 4/9 + 1/9 + 1/9 = 2/3, over 2 = 1/3
    deviation = math.sqrt(1 / 3) + 1e-4
    assert normalised([1.0, 0.0, 0.0]) == pytest.approx(
        [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation]
    )
    assert math.fsum(normalised([0.3, 0.7, 0.9, 0.2])) == pytest.approx(0, abs=1e-12)
