"""Two gradients of one batch: equal where the numbers are, and off by what was planted where they are not."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerodrift.audit.gradient import compare as module
from zerodrift.audit.gradient.compare import compare
from zerodrift.core.errors import InvalidPrompt, InvalidValue, UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState

VOCABULARY, GROUPS, SAMPLES, LENGTH = 11, 6, 4, 18
TEMPERATURE = 0.7


class Bigram(torch.nn.Module):
    """The smallest causal model: the next token by the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, 8)
        self.head = torch.nn.Linear(8, VOCABULARY)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.table

    def forward(self, input_ids: torch.Tensor, attention_mask=None) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


@pytest.fixture(scope="module")
def model():
    return Bigram()


@pytest.fixture(scope="module")
def outputs(model):
    """[group][sample] of ids and true logprobs."""
    rng = np.random.default_rng(0)
    found = []
    for group in range(GROUPS):
        samples = []
        for _ in range(SAMPLES):
            ids, logprobs = [group], []
            for _ in range(LENGTH):
                with torch.no_grad():
                    row = model(torch.tensor([ids])).logits[0, -1] / TEMPERATURE
                p = torch.log_softmax(row, -1)
                ids.append(
                    int(rng.choice(VOCABULARY, p=p.double().exp().numpy() / p.double().exp().sum().item()))
                )
                logprobs.append(float(p[ids[-1]]))
            samples.append((tuple(ids[1:]), tuple(logprobs)))
        found.append(samples)
    return found


def batch(outputs, report=lambda logprobs: logprobs, reward=None) -> ArchivedBatch:
    rollouts = tuple(
        ArchivedRollout(
            id=f"{group}/{sample}",
            prompt_token_ids=(group,),
            token_ids=ids,
            behavior_logprobs=tuple(float(value) for value in report(np.array(logprobs))),
            reward=float(ids.count(3)) if reward is None else reward,
            group=str(group),
            sampling=SamplingParams(temperature=TEMPERATURE),
            stated=("temperature",),
        )
        for group, samples in enumerate(outputs)
        for sample, (ids, logprobs) in enumerate(samples)
    )
    return ArchivedBatch(step=9, state=BatchState.QUARANTINE, rollouts=rollouts)


def literal(model, content: ArchivedBatch, epsilon: float, *, true: bool) -> dict[str, np.ndarray]:
    """The gradient of each group by the objective as it is written, through the whole model at once."""
    found = {}
    for group in dict.fromkeys(rollout.group for rollout in content.rollouts):
        mine = [rollout for rollout in content.rollouts if rollout.group == group]
        rewards = np.array([rollout.reward for rollout in mine])
        gains = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        total = torch.zeros(())
        for rollout, gain in zip(mine, gains, strict=True):
            ids = torch.tensor([[*rollout.prompt_token_ids, *rollout.token_ids]])
            p = torch.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, -1)
            p = p[torch.arange(len(rollout.token_ids)), ids[0, 1:]]
            below = p.detach() if true else torch.tensor(rollout.behavior_logprobs)
            ratio = torch.exp(p - below)
            total = total + torch.min(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain).sum()
        model.zero_grad()
        total.backward()
        found[group] = np.concatenate(
            [np.zeros(3) if p.grad is None else p.grad.numpy().ravel() for p in model.parameters()]
        )
    return found


def test_equal_numbers_give_one_gradient(model, outputs):
    found = compare(batch(outputs), model)
    assert found.whole.cosine == pytest.approx(1, abs=1e-6)
    assert found.whole.norm_ratio == pytest.approx(1, rel=1e-5)
    assert found.whole.clip_changed == 0
    assert found.error < 1e-5
    assert found.whole.tokens == GROUPS * SAMPLES * LENGTH


def noisy(logprobs):
    return logprobs + np.random.default_rng(int(-1e6 * logprobs.sum())).normal(0, 0.3, logprobs.shape)


@pytest.mark.parametrize("report", [noisy, lambda logprobs: TEMPERATURE * logprobs, np.roll], ids=["noise", "slope", "roll"])  # fmt: skip
def test_it_is_the_gradient_of_the_objective_as_it_is_written(model, outputs, report):
    content = batch(outputs, (lambda logprobs: np.roll(logprobs, 1)) if report is np.roll else report)
    found = compare(content, model, epsilon=0.1)
    engine, true = (literal(model, content, 0.1, true=each) for each in (False, True))
    one, other = sum(engine.values()), sum(true.values())
    length = np.linalg.norm(other)
    assert found.whole.cosine == pytest.approx(one @ other / np.linalg.norm(one) / length, abs=1e-5)
    assert found.whole.norm_ratio == pytest.approx(np.linalg.norm(one) / length, rel=1e-4)
    assert found.error == pytest.approx(np.linalg.norm(one - other) / length, rel=1e-4)
    each = np.array(list(true.values()))
    spread = GROUPS * each.var(axis=0, ddof=1).sum()
    assert found.noise == pytest.approx(math.sqrt(spread) / length, rel=1e-4)
    assert found.whole.cosine < 0.999
    assert found.whole.clip_changed > 0


def test_a_shift_within_the_clip_changes_the_length_alone(model, outputs):
    found = compare(batch(outputs, lambda logprobs: logprobs - 0.1), model)
    assert found.whole.cosine == pytest.approx(1, abs=1e-6)
    assert found.whole.norm_ratio == pytest.approx(math.exp(0.1), rel=1e-5)
    assert found.whole.mean_abs == pytest.approx(0.1, rel=1e-5)


def test_a_shift_beyond_the_clip_leaves_one_sign_alone(model, outputs):
    content = batch(outputs, lambda logprobs: logprobs - 0.3)
    found = compare(content, model)
    gains = sum(
        len(rollout.token_ids) for rollout in content.rollouts if rollout.reward > _mean(content, rollout)
    )
    assert found.whole.clip_changed == pytest.approx(gains / content.tokens)
    assert compare(content, model, epsilon_high=0.4).whole.clip_changed == 0


def _mean(content, rollout):
    return np.mean([each.reward for each in content.rollouts if each.group == rollout.group])


def test_a_fault_at_one_place_is_seen_in_its_part_alone(model, outputs):
    def first_token(logprobs):
        return np.where(np.arange(LENGTH) == 0, logprobs - 0.15 * np.sign(logprobs + 2.3), logprobs)

    found = {part.label: part for part in compare(batch(outputs, first_token), model).parts}
    assert found["first"].mean_abs == pytest.approx(0.15, rel=1e-4)
    assert found["first"].cosine < 0.9999
    for label in ("1-15", "16-255"):
        assert found[label].cosine == pytest.approx(1, abs=1e-6)
        assert found[label].mean_abs < 1e-6
    for kind in ("position", "log p"):
        assert sum(part.tokens for part in found.values() if part.kind == kind) == GROUPS * SAMPLES * LENGTH


def test_without_parts_the_whole_is_the_same(model, outputs, monkeypatch):
    content = batch(outputs, noisy)
    whole = compare(content, model)
    monkeypatch.setattr(module, "MOST_FOR_PARTS", 10)
    alone = compare(content, model)
    assert alone.parts == ()
    assert alone.whole.cosine == pytest.approx(whole.whole.cosine, rel=1e-6)
    assert alone.noise == pytest.approx(whole.noise, rel=1e-5)


def test_the_gradient_is_the_same_in_smaller_batches(model, outputs, monkeypatch):
    content = batch(outputs, noisy)
    whole = compare(content, model)
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * VOCABULARY * (LENGTH + 1) * 3)
    split = compare(content, model)
    assert split.whole.cosine == pytest.approx(whole.whole.cosine, rel=1e-6)
    assert split.error == pytest.approx(whole.error, rel=1e-5)
    assert split.noise == pytest.approx(whole.noise, rel=1e-5)


def test_what_has_no_gradient_or_does_not_fit_is_refused(model, outputs, monkeypatch):
    with pytest.raises(InvalidValue):
        compare(batch(outputs, reward=1.0), model)
    with pytest.raises(InvalidPrompt):
        compare(batch([[((VOCABULARY,), (-0.1,)), ((3,), (-0.1,))]]), model)
    monkeypatch.setattr(module, "MOST_PARAMETERS", 10)
    with pytest.raises(UnsupportedModel):
        compare(batch(outputs), model)


def test_numbers_that_clip_everything_leave_no_gradient(model, outputs):
    def hides(logprobs):
        return logprobs - 5

    ids = [[((3,) * LENGTH, (-1.0,) * LENGTH), ((4,) * LENGTH, (-1.0,) * LENGTH)]]
    content = batch(ids, hides)
    bad = content.rollouts[1]
    lifted = ArchivedRollout(
        **{
            name: getattr(bad, name)
            for name in bad.__struct_fields__
            if name not in ("digest", "behavior_logprobs")
        },
        behavior_logprobs=(0.0,) * LENGTH,
    )
    found = compare(
        ArchivedBatch(step=0, state=BatchState.HALT, rollouts=(content.rollouts[0], lifted)), model
    )
    assert found.whole.cosine is None
    assert found.whole.clip_changed > 0.9
    assert found.noise is None
