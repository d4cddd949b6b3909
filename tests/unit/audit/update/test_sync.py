"""Judgements on made-up numbers, then whole updates of a tiny engine that goes wrong in one way each."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import tiny

from zerodrift.audit.perturb import perturbed, write_checkpoint
from zerodrift.audit.plan import probe_requests
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.update import explanations, sync
from zerodrift.audit.update.arrival import shares
from zerodrift.audit.update.seen import Seen
from zerodrift.audit.update.sync import NEW, Update, weight_sync
from zerodrift.audit.update.weights import Move, UpdatedWeights
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.core.completion import Answer, Completion, FinishReason, Problem
from zerodrift.core.errors import BadAnswer, EngineRefused, EngineUnreachable
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.drift.gates import Gates
from zerodrift.faults.prefix_cache import PrefixCachingReference
from zerodrift.models.family.llama import LLAMA
from zerodrift.records.verdict import Outcome

SIZE = 40
RNG = np.random.default_rng(0)
OLD = RNG.normal(-2, 0.5, SIZE)
CHANGE = RNG.normal(0, 0.1, SIZE)


class Linear:
    """Weights whose tensors add up: each moves every logprob by its own part of the change."""

    def __init__(self, *effects: np.ndarray) -> None:
        self.parts = {f"model.layers.{number}.up.weight": effect for number, effect in enumerate(effects)}
        # Without rotary tables, whose base could be another.
        self.old, self.new, self.family = "old", SimpleNamespace(config=None), LLAMA
        self.rows = dict.fromkeys(self.parts, 1)

    def bring(self, model: Any) -> None:
        """Both are here."""

    def bring_both(self) -> None:
        """They are."""

    def slopes(self, completions: Sequence[Completion]) -> dict[str, np.ndarray]:
        return {name: part[places_of(completions), None] for name, part in self.parts.items()}

    def moved(self, moves: Sequence[Move]) -> Sequence[Move]:
        return moves

    def score(self, model: Sequence[Move], completions: Sequence[Completion]) -> np.ndarray:
        scores = OLD + sum(self.parts.values())
        for part, by in model:
            scores = scores + by * sum(self.parts[name] for name in part.tensors)
        return scores[places_of(completions)]


def places_of(completions: Sequence[Completion]) -> np.ndarray:
    """Which numbers belong to these completions: the first token of a prompt says which it is."""
    return np.concatenate([10 * completion.prompt_token_ids[0] + np.arange(10) for completion in completions])


PARTS = (0.5 * CHANGE, RNG.normal(0, 0.05, SIZE), RNG.normal(0, 1e-3, SIZE))
WEIGHTS: Any = Linear(*PARTS)
AT_NEW = OLD + sum(PARTS)


@pytest.fixture
def seen(completion):
    def build(reported, label=NEW, **fields):
        versions = (VersionSpan(WeightVersion(label), 0, 10),)
        completions = [
            completion((number, 2), (3,) * 10, versions=versions, **fields) for number in range(SIZE // 10)
        ]
        return Seen(completions, reported, AT_NEW, OLD)

    return build


@pytest.fixture
def engine(scripted):
    return scripted(None)


@pytest.fixture
def judge(engine, gates):
    def run(cached, fresh, returned=OLD):
        """`returned` is what was reported after the old weights were pushed back."""
        back = Seen(fresh.completions, returned, OLD, AT_NEW)
        return sync._judge(engine, WEIGHTS, cached, fresh, back, gates)

    return run


def cause(result: ProbeResult) -> str:
    assert result.record.status is Outcome.FAIL
    (only,) = result.causes
    return only.cause


def test_slopes_say_what_arrived(seen):
    assert seen(AT_NEW).slope == pytest.approx(1.0)
    assert seen(OLD).slope == pytest.approx(0.0)
    assert seen((OLD + AT_NEW) / 2).slope == pytest.approx(0.5)
    assert seen(AT_NEW).gap == 0.0
    assert seen(AT_NEW - 0.25).gap == pytest.approx(0.25)


def test_an_update_that_arrived(judge, seen):
    result = judge(seen(AT_NEW, cached_tokens=16), seen(AT_NEW))
    assert result.record.status is Outcome.PASS
    assert result.record.message == "the update arrived whole (slope 1.0000) and left nothing behind"
    assert result.record.evidence["cached_tokens"] == 64


def test_a_cache_that_held_nothing_is_mentioned(judge, seen):
    assert "held nothing to go stale" in judge(seen(AT_NEW), seen(AT_NEW)).record.message


@pytest.mark.parametrize(
    ("label", "name"), [(NEW, "weights/version-label"), ("initial", "weights/stale")], ids=["moved", "old"]
)
def test_an_update_that_did_not(judge, seen, label, name):
    result = judge(seen(OLD), seen(OLD, label))
    assert cause(result) == name
    assert result.causes[0].explained == pytest.approx(1.0)


def test_a_label_that_the_engine_does_not_keep_proves_nothing(judge, seen, engine):
    engine.capabilities -= {Capability.WEIGHT_VERSION}
    assert cause(judge(seen(OLD), seen(OLD))) == "weights/stale"


@pytest.mark.parametrize("absent", [(0,), (1,), (2,), (0, 2)])
def test_groups_that_did_not_arrive_are_named(judge, seen, absent):
    """Also the third, whose effect is a fiftieth of the others'."""
    result = judge(seen(OLD), seen(AT_NEW - sum(PARTS[number] for number in absent)))
    assert cause(result) == "weights/partial"
    assert result.causes[0].explained > 0.99
    names = {f"model.layers.{number}.up.weight" for number in absent}
    found = result.causes[0].located
    assert {part.removeprefix("layer ") for part in (each.part for each in found)} <= names | set(
        map(str, absent)
    )
    assert [each.estimate for each in found] == [0.0] * len(absent)


@pytest.mark.parametrize(("gate", "name"), [(0.006, "weights/partial"), (0.002, "unexplained")])
def test_rounding_that_is_allowed_does_not_hide_what_did_not_arrive(
    engine, seen, gates, monkeypatch, gate, name
):
    """Coarse precision leaves more than a tenth of the difference; where it may not, an account is not believed."""
    nothing_to_try(monkeypatch)
    rounding = np.where(np.arange(SIZE) % 2, 0.005, -0.005)
    reported = AT_NEW - PARTS[1] + rounding
    back = Seen(seen(OLD).completions, OLD, OLD, AT_NEW)
    result = sync._judge(engine, WEIGHTS, seen(reported), seen(reported), back, gates._replace(mean=gate))
    assert 0.5 < 1 - 0.005 / seen(reported).gap < 0.9
    assert cause(result) == name


def nothing_to_try(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    monkeypatch.setattr(explanations, "deliveries", lambda old, new: [])
    monkeypatch.setattr(sync, "not_asked", lambda model: missing)


class Scores:
    """Weights that are their own logprobs."""

    old, new = OLD, AT_NEW

    def bring(self, model: np.ndarray) -> None:
        """Both are here."""

    def score(self, model: np.ndarray, completions: Sequence[Completion]) -> np.ndarray:
        return model[places_of(completions)]


@pytest.fixture
def deliver(monkeypatch):
    """Makes these the only things that can go wrong on the way."""

    def use(**models):
        ways = [
            SimpleNamespace(cause=f"weights/{name}", message=name, build=lambda model=model: model)
            for name, model in models.items()
        ]
        monkeypatch.setattr(explanations, "scaled", lambda weights, seen, rng: None)
        monkeypatch.setattr(explanations, "rebased", lambda weights, seen: ())
        monkeypatch.setattr(explanations, "arrivals", lambda weights, seen, rng: ())
        monkeypatch.setattr(explanations, "deliveries", lambda old, new: ways)

    return use


def test_of_two_accounts_that_would_do_the_better_one_is_believed(engine, seen, gates, deliver):
    truth = AT_NEW - PARTS[1]
    deliver(dtype=AT_NEW - 0.7 * PARTS[1], swapped=truth)
    rounded: Any = seen(truth + np.where(np.arange(SIZE) % 2, 0.005, -0.005))
    coarse = gates._replace(mean=0.03)
    assert sync._undelivered(engine, Scores(), rounded, coarse).cause == "weights/swapped"


def test_a_fault_that_begins_late_is_explained_too(engine, seen, gates, deliver):
    """The first tokens, on which accounts are tried, have nothing to be explained."""
    late = AT_NEW - np.where(np.arange(SIZE) < 30, 0.0, PARTS[1])
    deliver(swapped=late)
    assert sync._undelivered(engine, Scores(), seen(late), gates).cause == "weights/swapped"


def test_one_replica_of_several(judge, seen):
    mixed = np.where(np.arange(SIZE) < 10, OLD, AT_NEW)
    result = judge(seen(mixed), seen(mixed))
    assert cause(result) == "weights/replica"
    assert "1 of 4 requests were answered with the old weights" in result.record.message


def test_requests_torn_in_the_middle_are_no_replica(judge, seen, monkeypatch):
    nothing_to_try(monkeypatch, "layers exchanged or moved")
    torn = np.where(np.arange(SIZE) % 10 < 5, OLD, AT_NEW)
    result = judge(seen(torn), seen(torn))
    assert cause(result) == "unexplained"
    assert "layers exchanged or moved" in result.record.message, "what could not be tried is said"


def test_a_group_that_arrived_by_halves_is_no_group_that_stayed_away(judge, seen):
    """Four fifths of its effect are gone: leaving it out explains three quarters, and a fifth of it all."""
    result = judge(seen(OLD), seen(AT_NEW - 0.8 * PARTS[0]))
    assert cause(result) == "weights/fraction"
    (found,) = result.causes[0].located
    assert found.part == "model.layers.0.up.weight"
    assert found.estimate == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("share", "named"), [(0.61, "weights/fraction"), (2.3, "weights/multiple"), (-1.0, "weights/multiple")]
)
def test_a_share_of_all_of_it(judge, seen, share, named):
    result = judge(seen(OLD), seen(OLD + share * (AT_NEW - OLD)))
    assert cause(result) == named
    (found,) = result.causes[0].located
    assert found.estimate == pytest.approx(share, abs=1e-6)
    assert found.low <= found.estimate <= found.high


@pytest.mark.parametrize("seed", range(8))
def test_what_follows_no_part_is_given_none(judge, seen, monkeypatch, seed):
    nothing_to_try(monkeypatch)
    rounded = AT_NEW + np.random.default_rng(seed).normal(0, 0.02, SIZE)
    assert cause(judge(seen(rounded), seen(rounded))) == "unexplained"


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (10, 1), (11, 2), (10**6, SIZE // 10)])
def test_the_first_completions_with_so_many_tokens(seen, tokens, count):
    some = seen(AT_NEW).first(tokens)
    assert len(some.completions) == count
    assert len(some.reported) == len(some.at_new) == len(some.at_old) == 10 * count


@pytest.mark.parametrize(
    ("returned", "named"), [(OLD + 0.1, "unexplained"), (AT_NEW, "weights/stale")], ids=["neither", "B"]
)
def test_weights_that_do_not_come_back(judge, seen, returned, named):
    result = judge(seen(AT_NEW), seen(AT_NEW), returned)
    assert cause(result) == named
    assert "after A→B→A" in result.record.message


def test_an_update_too_small_to_see_is_vacuous(engine, gates, completion):
    for change in (0.0, 1e-6):
        still = Seen([completion((1,), (3,) * SIZE)], OLD, OLD + change, OLD)
        result = sync._judge(engine, WEIGHTS, still, still, still, gates)
        assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
        assert np.isfinite(list(result.record.evidence.values())).all()


def test_shares_are_not_drowned_by_large_groups():
    large, small = RNG.normal(0, 1, SIZE), RNG.normal(0, 1e-5, SIZE)
    assert shares(-small, [large, small]) == pytest.approx([0.0, 1.0], abs=1e-6)
    assert shares(-small, [np.zeros(SIZE), small])[0] == 0.0


# --- whole updates ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update(checkpoint, tmp_path_factory):
    old = load_reference(checkpoint).model
    weights = perturbed(old, 0)
    after = write_checkpoint(weights.new, checkpoint, tmp_path_factory.mktemp("sync") / "b")
    return Update(checkpoint, after, True), weights


REQUESTS = probe_requests(512, 120, (0, 1, 2, 3), seed=1)[:4]


def push(
    engine: Any, update: tuple[Update, UpdatedWeights], gates: Gates, resets: bool = True
) -> ProbeResult:
    how, weights = update
    return weight_sync(engine, weights, how._replace(resets_cache=resets), REQUESTS, gates)


@pytest.fixture
def fresh(checkpoint):
    return ReferenceBackend(checkpoint, dtype="float32")


def test_a_sound_engine_takes_the_update_and_gives_it_back(fresh, update, gates):
    before = [tensor.clone() for tensor in fresh.model.parameters()]
    result = push(fresh, update, gates)
    assert result.record.status is Outcome.PASS
    assert result.record.evidence["slope"] == pytest.approx(1.0, abs=1e-3)
    assert result.record.evidence["predicted_change"] > 0.01
    assert all(map(torch.equal, before, fresh.model.parameters())), "the engine is left as it was found"


def test_an_engine_that_drops_the_update(fresh, update, gates):
    fresh.load_weights = lambda directory, version: None
    assert cause(push(fresh, update, gates)) == "weights/stale"


def test_an_engine_that_rounds_on_the_way(fresh, update, gates):
    load = fresh.load_weights

    def rounding(directory, version):
        load(directory, version)
        with torch.no_grad():
            for parameter in fresh.model.parameters():
                parameter.copy_(parameter.bfloat16().float())

    fresh.load_weights = rounding
    assert cause(push(fresh, update, gates)) == "weights/dtype"


@pytest.mark.parametrize(("resets", "name"), [(False, "weights/stale-prefix-cache"), (True, None)])
def test_a_prefix_cache_that_outlives_the_weights(fresh, update, gates, resets, name):
    engine = PrefixCachingReference(fresh, outlives_weights=True)
    result = push(engine, update, gates, resets)
    assert (result.causes[0].cause if result.causes else None) == name
    if name is not None:
        assert result.causes[0].explained > 0.9
        assert result.record.evidence["cached_tokens"] > 0


def test_nor_is_it_missed_where_no_salt_keeps_prompts_out_of_it(fresh, update, gates):
    engine = PrefixCachingReference(fresh, outlives_weights=True)
    engine.capabilities -= {Capability.CACHE_SALT}
    assert cause(push(engine, update, gates, resets=False)) == "weights/stale-prefix-cache"


@pytest.mark.parametrize(("gate", "name"), [(0.006, "weights/stale-prefix-cache"), (0.002, "unexplained")])
def test_nor_does_it_hide_a_stale_prefix(engine, seen, gates, monkeypatch, gate, name):
    rounding = np.where(np.arange(SIZE) % 2, 0.005, -0.005)
    replayed = AT_NEW - PARTS[1]
    parts = iter(np.split(replayed, SIZE // 10))
    monkeypatch.setattr(sync, "Teacher", lambda model: None)
    monkeypatch.setattr(sync, "_replay", lambda teacher, earlier, completion: next(parts))
    result = sync._judge(
        engine,
        WEIGHTS,
        seen(replayed + rounding, cached_tokens=2),
        seen(AT_NEW),
        Seen(seen(OLD).completions, OLD, OLD, AT_NEW),
        gates._replace(mean=gate),
    )
    assert cause(result) == name
    assert 0.5 < result.causes[0].explained < 0.9


@pytest.mark.parametrize("lacks", [Capability.LOAD_WEIGHTS, Capability.SEED])
def test_an_engine_that_cannot_be_updated_is_not_judged(scripted, update, gates, lacks):
    engine = scripted(None, capabilities=frozenset(Capability) - {lacks})
    result = push(engine, update, gates)
    assert result.record.status is Outcome.INCONCLUSIVE
    assert lacks.value in result.record.message


def test_an_engine_that_dies_gets_its_weights_back_first(fresh, update, gates):
    loaded = []
    load, generate = fresh.load_weights, fresh.generate

    def remember(directory, version):
        loaded.append(version.label)
        load(directory, version)

    def die(requests):
        if loaded:
            raise EngineUnreachable("gone")
        return generate(requests)

    fresh.load_weights, fresh.generate = remember, die
    with pytest.raises(EngineUnreachable):
        push(fresh, update, gates)
    assert loaded == [NEW, "audit-a"]


@pytest.mark.parametrize(
    ("holds", "state"),
    [
        ("old", "answers with the old weights"),
        ("torn", "answers with neither the old nor the new weights: it is left torn"),
        ("dead", "answers no request any more: it is left torn"),
    ],
)
def test_an_update_that_fails_midway_is_told_by_its_own_error_and_the_state(
    fresh, update, gates, holds, state
):
    """Putting the weights back may fail too, and that error came in the place of the first."""
    load, generate, failed = fresh.load_weights, fresh.generate, []

    def tear(directory, version):
        if version.label == NEW:
            failed.append("no room for layer 2")
            if holds == "torn":
                with torch.no_grad():
                    fresh.model.get_input_embeddings().weight.mul_(1.5)
            raise EngineRefused(failed[0])
        if holds != "old":
            raise EngineUnreachable("connection lost")
        load(directory, version)

    def die(requests):
        if failed and holds == "dead":
            raise EngineUnreachable("gone")
        return generate(requests)

    fresh.load_weights, fresh.generate = tear, die
    with pytest.raises(EngineRefused) as caught:
        push(fresh, update, gates)
    told = str(caught.value)
    assert state in told
    assert "no room for layer 2" in told
    assert ("connection lost" in told) is (holds != "old")
    assert "gone" not in told, "what follows from the failure is no news"


def test_weights_that_cannot_be_put_back_leave_a_server_of_which_that_is_said(fresh, update, gates):
    load = fresh.load_weights

    def once(directory, version):
        if version.label != NEW:
            raise EngineRefused("disk is gone")
        load(directory, version)

    fresh.load_weights = once
    with pytest.raises(EngineRefused) as caught:
        push(fresh, update, gates)
    assert "answers with the new weights" in str(caught.value)
    assert "disk is gone" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer((), (Problem("value/non-finite", "logprobs[2] is nan"),)), "logprobs[2] is nan"),
        (Answer(()), "no sample at all"),
    ],
)
def test_answers_that_cannot_be_used(scripted, update, gates, answer, words):
    with pytest.raises(BadAnswer, match=words.replace("[", r"\[")):
        push(scripted(lambda request, number: answer), update, gates)


def test_answers_without_a_token_prove_no_update(scripted, completion, update, gates):
    """All means are then NaN, and every comparison with one is false."""
    silent = scripted(
        lambda request, number: Answer(
            (completion(request.prompt.token_ids, (), finish_reason=FinishReason.ABORT),)
        )
    )
    with pytest.raises(BadAnswer, match="without a token"):
        push(silent, update, gates)


def test_of_a_model_without_a_cache_no_replay_is_asked_for():
    """Scored in two parts, the second would lack its context, and the cause would be one that is not there."""
    weights: Any = SimpleNamespace(new=tiny("openai-gpt"), old=tiny("openai-gpt"))
    unread: Any = None
    cause = sync._stale_prefix(ReferenceBackend("testbed:llama"), weights, unread, unread)
    assert (cause.cause, cause.explained) == ("unexplained", 0.0)
