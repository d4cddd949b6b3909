"""Baselines, ranks, archive and rewards of the monitor, on small batches whose answers are known."""

import msgspec
import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.baseline import WARM_UP, Baseline, WarmUp, of_canary
from zerodrift.monitor.decision import Code, Gap, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import BoundReward, Output, digest_of
from zerodrift.monitor.strata import RARITIES
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.directory import write_verdict
from zerodrift.records.verdict import Outcome, VerdictRecord

SEQUENCES, TOKENS = 64, 40


def batch(rng, nats=0.01, **more):
    behavior = -rng.exponential(1.0, (SEQUENCES, TOKENS)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    return {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0, **more}


def warmed(**settings):
    rng = np.random.default_rng(0)
    monitor = Monitor(**settings)
    for _ in range(WARM_UP + 5):
        assert monitor.observe(**batch(rng)).state is State.OK
    return monitor, rng


def test_the_first_batches_become_the_baseline_and_bad_ones_do_not():
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for _ in range(WARM_UP - 1):
        assert monitor.observe(**batch(rng)).baseline is None
    assert not monitor.observe(**batch(rng, nats=0.2)).train
    assert monitor.remembered.baseline is None
    monitor.observe(**batch(rng))
    assert monitor.remembered.baseline.source == "first batches"
    found = monitor.observe(**batch(rng)).baseline
    assert found.mean_abs == pytest.approx(0.01 * np.sqrt(2 / np.pi), rel=0.05)
    assert found.growth == 1.0


def test_twice_the_expected_in_one_batch_is_quarantined_below_every_gate():
    monitor, rng = warmed()
    found = monitor.observe(**batch(rng, nats=0.025))
    assert (found.state, found.gap) == (State.QUARANTINE, Gap.MISMATCH)
    assert {reason.code for reason in found.reasons if reason.bad} == {Code.JUMP}


def test_a_replica_is_named_and_healthy_ones_are_not():
    monitor, rng = warmed()
    given = batch(rng, groups={"replica": [place % 4 for place in range(SEQUENCES)]})
    given["old_logprobs"][1::4] += np.where(rng.random((16, TOKENS)) < 0.5, 0.04, -0.04)
    found = monitor.observe(**given)
    assert {reason.where for reason in found.reasons if reason.bad and "replica" in reason.where} == {
        "replica=1"
    }
    views = {view.label: view.against_baseline for view in found.groups if view.kind == "replica"}
    assert views["1"] > 3
    assert max(views[label] for label in "023") < 1.2


def test_a_lasting_bias_is_told_from_a_lasting_scale():
    for change, code in ((0.0025, Code.BIAS), (-0.0025, Code.BIAS)):
        monitor, rng = warmed()
        for _ in range(25):
            given = batch(rng)
            given["old_logprobs"] = given["old_logprobs"] + change
            found = monitor.observe(**given)
            if not found.train:
                break
        bad = [reason for reason in found.reasons if reason.bad]
        assert bad[0].code is code
        assert bad[0].where == ""
    monitor, rng = warmed()
    while (found := monitor.observe(**batch(rng, nats=0.0125))).train:
        assert found.step < 40
    assert found.reasons[0].code is Code.SCALE


def test_an_alarm_ends_after_as_many_good_batches_as_the_breaker_asks_for():
    monitor, rng = warmed()
    monitor.observe(**batch(rng, nats=0.05))
    after = [monitor.observe(**batch(rng)).state for _ in range(4)]
    assert after == [State.WARN, State.WARN, State.OK, State.OK]


@pytest.mark.parametrize(("version_of", "follows"), [(lambda step: step, True), (lambda step: 7, False)])
def test_the_level_follows_new_weights_and_only_those(version_of, follows):
    """A tenth more over 100 steps is what a policy does, and what an engine whose weights stand still must not do."""
    rng = np.random.default_rng(1)
    monitor = Monitor()
    for step in range(120):
        version, nats = version_of(step), 0.01 * (1 + max(0, step - 15) / 1000)
        found = monitor.observe(**{**batch(rng, nats), "versions": version, "trainer_version": version})
        if not found.train:
            break
    assert found.train is follows
    assert (found.baseline.growth > 1.05) is follows
    assert follows or found.baseline.growth == 1.0


def test_a_canary_is_a_baseline_at_once():
    rng = np.random.default_rng(2)
    canary = batch(rng)
    baseline = of_canary(canary["behavior_logprobs"], canary["old_logprobs"])
    monitor = Monitor(baseline=baseline)
    assert monitor.observe(**batch(rng)).state is State.OK
    assert not monitor.observe(**batch(rng, nats=0.025)).train


def test_a_canary_of_the_watched_engine_cannot_bring_the_fault_in():
    monitor, rng = warmed()
    grown, level = batch(rng, nats=0.02), batch(rng, nats=0.0105)
    with pytest.raises(InvalidValue):
        monitor.retake(grown["behavior_logprobs"], grown["old_logprobs"])
    assert monitor.remembered.baseline.source == "first batches"
    assert monitor.retake(level["behavior_logprobs"], level["old_logprobs"]).source == "canary"
    trusted = monitor.retake(grown["behavior_logprobs"], grown["old_logprobs"], trusted=True)
    assert monitor.remembered.baseline == trusted
    assert monitor.observe(**batch(rng, nats=0.02)).train
    far = batch(rng, nats=0.5)
    with pytest.raises(InvalidValue):
        monitor.retake(far["behavior_logprobs"], far["old_logprobs"], trusted=True)


@pytest.mark.parametrize("values", [np.full(100, -1.0), np.full((50, 60), np.nan)])
def test_a_canary_that_says_nothing_is_refused(values):
    with pytest.raises(InvalidValue):
        of_canary(values, values)


def test_an_exact_engine_has_a_baseline_and_its_first_wrong_bit_is_seen():
    rng = np.random.default_rng(0)
    monitor = Monitor(precision="fp32")
    for _ in range(WARM_UP + 2):
        given = batch(rng, nats=0.0)
        assert monitor.observe(**given).state is State.OK
    assert not monitor.observe(**batch(rng, nats=5e-6)).train


def verdict(outcome=Outcome.PASS):
    engine = EngineFingerprint(engine="vllm", semantic={}, numeric={}, deployment={})
    return VerdictRecord(
        verdict=outcome,
        guilty="none",
        message="s",
        engine=engine,
        reference=engine,
        model="m",
        precision="bf16",
        floor={"mean": 0.002},
        metrics={"mean": 0.002},
        gates={"mean": 0.005, "p90": 0.0125, "k3": 5e-5, "veto": 2.0},
    )


def test_an_audit_gives_the_gates_and_a_failed_one_gives_nothing(tmp_path):
    write_verdict(tmp_path, verdict())
    monitor = Monitor(baseline=tmp_path)
    assert (monitor.gate.mean_abs, monitor.gate.k3) == (0.005, 5e-5)
    rng = np.random.default_rng(0)
    assert not monitor.observe(**batch(rng, nats=0.01)).train
    for _ in range(WARM_UP):
        monitor.observe(**batch(rng, nats=0.002))
    assert monitor.remembered.baseline.source == "audit and first batches"
    with pytest.raises(InvalidValue):
        Monitor(baseline=verdict(Outcome.FAIL))


@pytest.mark.parametrize("scales", [(0.01,), (0.0,) * RARITIES, (float("nan"),) * RARITIES])
def test_a_baseline_is_a_whole_curve(scales):
    with pytest.raises(InvalidValue):
        Baseline(source="canary", scales=scales, bias=0.0, mean_abs=0.01)


def test_strata_with_few_tokens_take_the_shape_of_the_others():
    few = WarmUp(
        tokens=(1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 3.0), sizes=(1.0, 6.0, 20.0, 32.0, 40.0, 9.0)
    )
    scales = few.baseline("x").scales
    assert scales[2] == 0.02
    assert scales[5] == pytest.approx(0.044, rel=0.02)


def test_whoever_gives_no_versions_is_told_at_once_and_again():
    monitor = Monitor(MonitoringConfig(check_interval_steps=3))
    behavior = np.full((8, 30), -1.0)
    codes = [
        [reason.code for reason in monitor.observe(behavior_logprobs=behavior, old_logprobs=behavior).reasons]
        for _ in range(4)
    ]
    assert codes == [[Code.NOT_OBSERVED], [], [], [Code.NOT_OBSERVED]]


# --- archive ----------------------------------------------------------------------------------------------------


class Kept:
    def __init__(self):
        self.batches = []

    def append(self, batch):
        self.batches.append(batch)


def rollouts(lengths=None):
    """Prompts and outputs of a batch, padded as a trainer has them."""
    given = {"prompt_ids": [[1, 2, 3]] * SEQUENCES, "completion_ids": np.full((SEQUENCES, TOKENS), 7)}
    if lengths is not None:
        given["mask"] = np.arange(TOKENS) < np.asarray(lengths)[:, None]
    return given


def test_bad_batches_and_some_healthy_ones_are_archived_as_they_came():
    archive = Kept()
    monitor = Monitor(archive=archive, healthy_every=5)
    rng = np.random.default_rng(0)
    for step in range(12):
        given = batch(rng, nats=0.3 if step == 7 else 0.01)
        monitor.observe(**given, **rollouts(), step=step)
        if step == 7:
            bad = given
    assert [each.step for each in archive.batches] == [4, 7, 9]
    assert [each.state for each in archive.batches] == ["ok", "quarantine", "warn"]
    kept = archive.batches[1]
    assert len(kept.rollouts) == SEQUENCES
    assert kept.trainer_version == "0"
    assert kept.reasons
    for place, rollout in enumerate(kept.rollouts):
        assert rollout.prompt_token_ids == (1, 2, 3)
        assert rollout.token_ids == (7,) * TOKENS
        assert rollout.behavior_logprobs == tuple(bad["behavior_logprobs"][place].tolist())
        assert rollout.old_logprobs == tuple(bad["old_logprobs"][place].tolist())


def test_where_the_breaker_is_off_the_same_batches_are_archived():
    rng, archives = np.random.default_rng(0), (Kept(), Kept())
    enabled, watching = (
        Monitor(MonitoringConfig(circuit_breaker_enabled=on), archive=archive)
        for on, archive in zip((True, False), archives, strict=True)
    )
    for step in range(6):
        given = {**batch(rng, nats=0.3 if step > 1 else 0.01), **rollouts()}
        enabled.observe(**given)
        assert watching.observe(**given).train
    # Nobody stops at a halt that is none, and what is healthy after it is not kept as if it were bad.
    watching.observe(**batch(rng), **rollouts())
    kept, watched = ([(each.step, each.state) for each in archive.batches] for archive in archives)
    assert kept == watched
    assert [step for step, _ in kept] == [2, 3, 4, 5]
    assert {state for _, state in watched} == {"quarantine", "halt"}


def test_padding_is_not_archived():
    archive = Kept()
    lengths = [TOKENS - place % 5 for place in range(SEQUENCES)]
    monitor = Monitor(archive=archive, healthy_every=1)
    monitor.observe(**batch(np.random.default_rng(0)), **rollouts(lengths))
    assert [len(each.token_ids) for each in archive.batches[0].rollouts] == lengths
    assert [len(each.behavior_logprobs) for each in archive.batches[0].rollouts] == lengths


def test_who_made_what_is_archived():
    archive = Kept()
    groups = {"replica": ["a", "b"] * (SEQUENCES // 2), "environment": ["maths"] * SEQUENCES}
    own = outputs()
    rewards = [BoundReward(*output, float(place)) for place, output in enumerate(own)]
    Monitor(archive=archive, healthy_every=1).observe(
        **batch(np.random.default_rng(0)), **rollouts(), groups=groups, rewards=rewards, outputs=own
    )
    first, second, *_ = archive.batches[0].rollouts
    assert (first.replica, second.replica, first.environment) == ("a", "b", "maths")
    assert (first.id, second.id) == (own[0].id, own[1].id)
    assert (first.reward, second.reward) == (0.0, 1.0)


def test_missing_logprobs_are_archived_as_missing():
    archive = Kept()
    given = batch(np.random.default_rng(0))
    del given["behavior_logprobs"]
    assert not Monitor(archive=archive).observe(**given, **rollouts()).train
    assert np.isnan(archive.batches[0].rollouts[0].behavior_logprobs).all()


def test_without_ids_there_is_nothing_to_archive():
    monitor = Monitor(archive=Kept())
    with pytest.raises(InvalidValue):
        monitor.observe(**batch(np.random.default_rng(0)))
    assert monitor.remembered.step is None


def test_a_directory_is_an_archive_that_keeps_what_it_is_handed(tmp_path):
    rng = np.random.default_rng(0)
    monitor = Monitor(archive=tmp_path / "archive", healthy_every=2)
    for _ in range(4):
        monitor.observe(**batch(rng), **rollouts())
    assert [entry.step for entry in ArchiveReader(tmp_path / "archive").entries()] == [1, 3]


def test_an_archive_that_cannot_keep_a_batch_is_heard():
    class Full:
        def append(self, batch):
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - the archive's own
        Monitor(archive=Full(), healthy_every=1).observe(**batch(np.random.default_rng(0)), **rollouts())


# --- rewards ------------------------------------------------------------------------------------------------------


def outputs():
    return [Output(str(place), digest_of([place, 1])) for place in range(SEQUENCES)]


def test_rewards_belong_to_their_outputs():
    rng, own = np.random.default_rng(0), outputs()
    rewards = [BoundReward(*output, 1.0) for output in own]
    monitor = Monitor()
    assert monitor.observe(**batch(rng), rewards=rewards, outputs=own).train
    swapped = [rewards[1], rewards[0], *rewards[2:]]
    found = monitor.observe(**batch(rng), rewards=swapped, outputs=own)
    assert [reason.code for reason in found.reasons if reason.bad] == [Code.REWARD_MISBOUND]
    assert found.rewards.misbound == 2
    edited = [rewards[0]._replace(digest=digest_of([9])), *rewards[1:]]
    assert monitor.observe(**batch(rng), rewards=edited, outputs=own).rewards.misbound == 3
    twice = [rewards[0], *rewards[:-1]]
    assert not monitor.observe(**batch(rng), rewards=twice, outputs=[own[0], *own[:-1]]).train
    assert len(monitor.remembered.rewards.values) == SEQUENCES


@pytest.mark.parametrize("given", [None, outputs()[:-1]])
def test_bound_rewards_need_something_to_be_bound_to(given):
    rewards = [BoundReward(*output, 1.0) for output in outputs()]
    with pytest.raises(InvalidValue):
        Monitor().observe(**batch(np.random.default_rng(0)), rewards=rewards, outputs=given)


def test_a_shift_of_rewards_warns_and_learning_does_not():
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for step in range(40):
        rewards = (rng.random(SEQUENCES) < 0.3 + step / 400).astype(float)
        assert monitor.observe(**batch(rng), rewards=rewards).state is State.OK
    found = monitor.observe(**batch(rng), rewards=np.zeros(SEQUENCES))
    assert found.state is State.WARN
    assert [reason.code for reason in found.reasons] == [Code.REWARD_SHIFT]


def test_a_change_of_shape_alone_is_seen_by_the_test_of_distributions():
    rng = np.random.default_rng(0)
    monitor = Monitor(MonitoringConfig(check_interval_steps=10))
    for _ in range(9):
        monitor.observe(**batch(rng), rewards=rng.choice([0.0, 1.0], SEQUENCES))
    found = monitor.observe(**batch(rng), rewards=np.full(SEQUENCES, 0.5))
    assert [reason.code for reason in found.reasons] == [Code.REWARD_SHIFT]
    assert found.probe_due


def test_samples_of_one_prompt_are_one_reward():
    groups = {"prompt": [place // 8 for place in range(SEQUENCES)]}
    rng = np.random.default_rng(0)
    found = Monitor().observe(**batch(rng), rewards=rng.random(SEQUENCES), groups=groups)
    assert found.rewards.count == 8


def test_rewards_against_a_reference_on_probe_prompts():
    rng, monitor = np.random.default_rng(0), Monitor()
    same, other = rng.random(100) < 0.5, rng.random(100) < 0.9
    assert monitor.compare_rewards(same, rng.random(100) < 0.5) is None
    assert monitor.compare_rewards(same, other).state is State.QUARANTINE
    with pytest.raises(InvalidValue):
        monitor.compare_rewards(same[:5], other)


def test_memory_does_not_grow_with_steps():
    monitor, rng = warmed()
    sizes = []
    for _ in range(3):
        for _ in range(30):
            monitor.observe(**batch(rng, rewards=rng.random(SEQUENCES)))
        sizes.append(len(msgspec.json.encode(monitor.remembered)))
    assert sizes[2] <= sizes[1] * 1.02


def test_groups_are_few_and_have_names_of_their_own():
    rng = np.random.default_rng(0)
    monitor = Monitor(baseline=of_canary(**canary(rng)))
    many = {"behavior_logprobs": np.full((65, TOKENS), -1.0), "old_logprobs": np.full((65, TOKENS), -1.0)}
    with pytest.raises(InvalidValue):
        monitor.observe(**many, versions=0, trainer_version=0, groups={"environment": range(65)})
    monitor.observe(**many, versions=0, trainer_version=0, groups={"environment": [0, *range(64)]})
    with pytest.raises(InvalidValue):
        monitor.observe(**batch(rng, groups={"length": ["long"] * SEQUENCES}))


def canary(rng, nats=0.01):
    given = batch(rng, nats)
    return {"behavior_logprobs": given["behavior_logprobs"], "trainer_logprobs": given["old_logprobs"]}


def test_a_canary_above_the_gate_is_no_baseline():
    with pytest.raises(InvalidValue):
        Monitor(baseline=of_canary(**canary(np.random.default_rng(0), nats=0.2)))


def test_a_halted_monitor_says_so_of_good_batches_too():
    monitor = Monitor()
    for _ in range(3):
        monitor.trigger_alert()
    found = monitor.observe(**batch(np.random.default_rng(0)))
    assert (found.state, [reason.code for reason in found.reasons]) == (State.HALT, [Code.HALTED])


def test_a_kl_that_is_below_zero_counts_by_its_size():
    """k1 with its sign swapped is a common slip."""
    assert Monitor().log_step(0, kl_estimate=-0.2).state is State.QUARANTINE
    assert Monitor().log_step(0, kl_estimate=-1e-4).state is State.OK


@pytest.mark.parametrize(
    "given",
    [
        {"reward_mean": "a"},
        {"reward_mean": [1.0, 2.0]},
        {"reference_kl": "0.1"},
        {"kl_estimate": None},
        {"step": -1},
    ],
)
def test_what_is_no_number_or_no_step_is_refused_by_name(given):
    with pytest.raises(InvalidValue, match=next(iter(given))):
        Monitor().log_step(**{"step": 3, "kl_estimate": 1e-4, **given})


def test_one_that_is_closed_judges_no_more(tmp_path):
    monitor = Monitor(directory=tmp_path)
    monitor.log_step(0, kl_estimate=1e-4)
    monitor.close()
    with pytest.raises(InvalidValue):
        monitor.log_step(1, kl_estimate=1e-4)
    assert Monitor(directory=tmp_path).log_step(1, kl_estimate=1e-4).state is State.OK


@pytest.mark.parametrize("precision", ["bfloat16", "float32", None, 16])
def test_a_precision_by_another_name(precision):
    with pytest.raises(InvalidValue):
        Monitor(precision=precision)
