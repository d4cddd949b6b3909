import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from zerodrift import models
from zerodrift.audit.blame import JUDGED, Blame, _mean
from zerodrift.audit.perturb import perturbed, write_checkpoint
from zerodrift.audit.probes.result import found
from zerodrift.audit.progress import Silent
from zerodrift.audit.recorded.checkpoints import Checkpoints
from zerodrift.audit.recorded.conclude import PREVIOUS_IS_THEIRS
from zerodrift.audit.recorded.scored import ScoredDump
from zerodrift.audit.recorded.search import joined
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.core.errors import RecordError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.dump import Dump
from zerodrift.records.dump_formats import DumpFormat
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import FoundBy, Outcome, Probe
from zerodrift.view.report import render

MODEL = "testbed:llama"


def rollouts(
    engine: ReferenceBackend, steps: range, trainer: ReferenceBackend | None = None
) -> list[RecordedRollout]:
    """Two rollouts of 16 tokens in each step, drawn and scored by the engine, and scored by the trainer as well."""
    requests = [
        Request(Prompt((0, 5 + number, 40, 7)), SamplingParams(max_tokens=16, seed=number, ignore_eos=True))
        for number in range(2 * steps.start, 2 * steps.stop)
    ]
    ids = [answer.completions[0].sequence for answer in engine.generate(requests)]
    scores = zip(ids, engine.score(ids), (trainer or engine).score(ids), strict=True)
    return [
        RecordedRollout(
            source="d",
            line=number + 1,
            step=steps.start + number // 2,
            prompt=each[:4],
            output=each[4:],
            logprobs=tuple(numbers[3:]),
            trainer_logprobs=tuple(trained[3:]),
            sampling=SamplingParams(),
        )
        for number, (each, numbers, trained) in enumerate(scores)
    ]


def blame(recorded: list[RecordedRollout], reference: ReferenceBackend, **options: object) -> Blame:
    dump = Dump(format=DumpFormat.PLAIN, rollouts=tuple(recorded), lines=len(recorded))
    return Blame(dump=dump, reference=reference, precision=Precision.FP32, **options)


def test_a_run_directory_that_can_be_rendered(tmp_path):
    reference = ReferenceBackend(MODEL)
    blamed = blame(rollouts(reference, range(8)), reference, reproduce="zerodrift blame d").run()
    assert blamed.record.verdict is Outcome.PASS
    assert blamed.record.reproduce == "zerodrift blame d"
    assert {probe.name for probe in blamed.record.probes} >= {
        "dump",
        "parameters",
        "parity",
        "trainer",
        "trainer-since",
    }
    blamed.write(tmp_path / "run", reference.tokenizer.decode)
    assert len((tmp_path / "run" / JUDGED).read_bytes().splitlines()) == 16
    assert "The same policy" in render(tmp_path / "run")


def trained_as(recorded: list[RecordedRollout], change: Callable[[float], float]) -> list[RecordedRollout]:
    """With other numbers of the trainer's."""
    return [
        msgspec.structs.replace(each, trainer_logprobs=tuple(change(number) for number in each.logprobs))
        for each in recorded
    ]


def test_an_offset_of_the_trainer_is_held_against_the_trainers_own_gates():
    """Its precision is not told, so its gates are wide; those of the engine, whose numbers are sharp, are not its."""
    reference = ReferenceBackend(MODEL)
    recorded = trained_as(rollouts(reference, range(24)), lambda number: number - 0.2)
    record = replace(blame(recorded, reference), precision=None).run().record
    assert (record.verdict, record.guilty) == (Outcome.FAIL, "trainer")
    assert [cause.cause for cause in record.causes if cause.gating] == ["unexplained"]
    assert record.metrics["mean"] == pytest.approx(0.2, rel=1e-3)
    assert 1 < record.metrics["mean"] / record.gates["mean"] < 100


@pytest.mark.parametrize("side", ["logprobs", "trainer_logprobs"])
def test_numbers_that_nobody_filled_in(side):
    reference = ReferenceBackend(MODEL)
    recorded = [
        msgspec.structs.replace(each, **{side: (0.0,) * len(each.output)})
        for each in rollouts(reference, range(8))
    ]
    with pytest.raises(RecordError, match=f"all 256 {side} of the dump are 0"):
        blame(recorded, reference).run()


def test_a_sampler_that_leaves_one_token_reports_zeros_and_rightly():
    """Processed logprobs after top-k 1: every token is certain."""
    reference = ReferenceBackend(MODEL)
    requests = [
        Request(
            Prompt((0, 5 + number, 40, 7)),
            SamplingParams(max_tokens=16, top_k=1, seed=number, ignore_eos=True),
        )
        for number in range(16)
    ]
    ids = [answer.completions[0].sequence for answer in reference.generate(requests)]
    recorded = [
        msgspec.structs.replace(
            each,
            output=own[4:],
            logprobs=(0.0,) * 16,
            trainer_logprobs=None,
            sampling=SamplingParams(top_k=1),
        )
        for each, own in zip(rollouts(reference, range(8)), ids, strict=True)
    ]
    assert blame(recorded, reference).run().record.verdict is not Outcome.FAIL


def test_weights_from_before_an_update(tmp_path):
    before = models.materialise(MODEL, tmp_path / "before")
    older = ReferenceBackend(before)
    after = write_checkpoint(perturbed(older.model, 1).new, before, tmp_path / "after")
    newer = ReferenceBackend(after)
    stale = rollouts(older, range(4, 8), trainer=newer)
    blamed = blame([*rollouts(newer, range(4)), *stale], newer, previous=before).run()
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "weight sync")
    assert [cause.cause for cause in blamed.record.causes] == ["weights/stale"]
    assert blamed.since == (
        "since step 4: 8 of 8 rollouts have the numbers of the previous weights, and 8 of 8 before it are the checkpoint's"
    )
    assert blamed.side.endswith("and the trainer's are the checkpoint's")
    nearer = [judged.previous_mean < judged.mean for judged in blamed.judged]
    assert nearer == [False] * 8 + [True] * 8


def test_a_checkpoint_that_is_not_theirs_is_no_late_update(tmp_path):
    """Engine and trainer agree, and --previous has their numbers: --model is what is wrong, and no update is missing."""
    before = models.materialise(MODEL, tmp_path / "before")
    theirs = ReferenceBackend(before)
    after = write_checkpoint(perturbed(theirs.model, 1).new, before, tmp_path / "after")
    asked = f"zerodrift blame d --previous {before} --model={after} --precision fp32"
    blamed = blame(
        rollouts(theirs, range(8)), ReferenceBackend(after), previous=before, reproduce=asked
    ).run()
    assert (blamed.record.verdict, blamed.record.message) == (Outcome.INCONCLUSIVE, PREVIOUS_IS_THEIRS)
    assert [(cause.cause, cause.gating) for cause in blamed.record.causes] == [("weights/stale", False)]
    assert [each.command for each in blamed.to_type] == [
        f"zerodrift blame d --precision fp32 --model {before}"
    ]
    assert (blamed.side, blamed.since) == ("cannot be told", "nothing to date")


@pytest.mark.long
def test_a_fault_without_a_name_is_dated_where_it_parts_the_steps():
    """Four steps are right to the last digit and one is not: there is nothing to bet on."""
    reference = ReferenceBackend(MODEL)
    recorded = [
        msgspec.structs.replace(
            each, step=at // 6, logprobs=tuple(v - 0.3 * (at // 6 == 3) for v in each.logprobs)
        )
        for at, each in enumerate(rollouts(reference, range(15)))
    ]
    blamed = blame(recorded, reference).run()
    assert [cause.cause for cause in blamed.record.causes if cause.gating] == ["unexplained"]
    assert blamed.since == (
        "since step 3, last seen in step 3: 6 of 6 rollouts leave the checkpoint's numbers, and 18 of 18 before it are "
        "the checkpoint's"
    )


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    """Four checkpoints, as a policy that is trained leaves them: step_0 to step_3."""
    folder = tmp_path_factory.mktemp("moving")
    first = models.materialise(MODEL, folder / "step_0")
    model = ReferenceBackend(first).model
    for step in range(1, 4):
        write_checkpoint(perturbed(model, step).new, first, folder / f"step_{step}")
    return folder


def test_a_trainer_with_the_numbers_of_the_older_weights_is_told_so(tmp_path):
    """The checkpoints are exchanged, and an engine that took the update late looks as if it had gone back."""
    before = models.materialise(MODEL, tmp_path / "before")
    late = ReferenceBackend(before)
    after = write_checkpoint(perturbed(late.model, 1).new, before, tmp_path / "after")
    trainer = ReferenceBackend(after)
    recorded = [
        each
        for step, engine in enumerate((trainer, late))
        for each in rollouts(engine, range(4 * step, 4 * step + 4), trainer)
    ]
    blamed = blame(recorded, late, previous=after).run()
    (cause,) = blamed.record.causes
    assert cause.cause == "weights/stale"
    assert "16 of 16 rollouts have the trainer's numbers of the previous weights" in cause.evidence
    assert cause.fix.endswith("they belong behind --model, and the others behind --previous")


def moved(folder: Path, late: int, behind: int = 1) -> list[RecordedRollout]:
    """Eight rollouts of each step; from step `late` on by the weights of `behind` steps before."""
    recorded = []
    for step in range(4):
        made_by = step - behind if step >= late else step
        engine = ReferenceBackend(folder / f"step_{made_by}")
        for each in rollouts(engine, range(4 * step, 4 * step + 4)):
            recorded.append(
                msgspec.structs.replace(
                    each, step=step, line=len(recorded) + 1, version=str(step), trainer_logprobs=None
                )
            )
    return recorded


@pytest.mark.parametrize(("late", "causes"), [(4, []), (2, ["weights/stale"])], ids=["sound", "late"])
def test_a_policy_that_moves_is_judged_by_the_checkpoint_of_each_step(moving, late, causes):
    pattern = f"{moving}/step_{{step}}"
    blamed = blame(
        moved(moving, late), ReferenceBackend(moving / "step_0"), checkpoints=Checkpoints(pattern)
    ).run()
    assert [cause.cause for cause in blamed.record.causes] == causes
    assert blamed.record.verdict is (Outcome.FAIL if causes else Outcome.PASS)
    assert blamed.record.model == pattern
    # The first step has none before it.
    assert [judged.previous_mean is None for judged in blamed.judged] == [True] * 8 + [False] * 24
    if causes:
        assert blamed.since.startswith("since step 2: 16 of 16 rollouts")


def test_an_engine_that_is_two_updates_late_is_found_by_their_checkpoint(moving):
    reference = ReferenceBackend(moving / "step_0")
    blamed = blame(moved(moving, 2, 2), reference, checkpoints=Checkpoints(f"{moving}/step_{{step}}")).run()
    (cause,) = blamed.record.causes
    assert cause.cause == "weights/stale"
    assert re.match(
        r"of step (2|3), 8 of 8 rollouts have the numbers of the weights of step (0|1): ", cause.evidence
    )
    assert blamed.since.startswith("since step 2: 16 of 16 rollouts")
    assert reference.version.label in ("2", "3")


def test_one_checkpoint_for_all_steps_is_wrong_where_the_policy_moves(moving):
    """What the checkpoints of all steps are for: without them a healthy run looks stale."""
    recorded, reference = moved(moving, 4), ReferenceBackend(moving / "step_0")
    alone = ScoredDump(recorded, reference, None, Silent()).sizes
    assert (alone < 1e-5).tolist() == [True] * 8 + [False] * 24
    places = Checkpoints(f"{moving}/step_{{step}}").of(recorded)
    assert (ScoredDump(recorded, reference, None, Silent(), places).sizes < 1e-5).all()


def test_a_cause_of_a_moving_policy_is_found_in_its_worst_step(moving):
    turned = [
        msgspec.structs.replace(each, logprobs=tuple(value / np.log(2) for value in each.logprobs))
        if each.step == 3
        else each
        for each in moved(moving, 4)
    ]
    reference = ReferenceBackend(moving / "step_0")
    blamed = blame(turned, reference, checkpoints=Checkpoints(f"{moving}/step_{{step}}")).run()
    assert [cause.cause for cause in blamed.record.causes] == ["semantic/notation"]
    assert reference.version.label == "3"


def test_a_cause_of_both_sides_is_told_once():
    engine = found("semantic/off-by-one", "vllm", FoundBy.VALUE, "one late")
    trainer = [
        found(name, "trainer", Probe.TRAINER, "why") for name in ("semantic/off-by-one", "trainer/autocast")
    ]
    causes = joined([engine], trainer)
    assert [cause.cause for cause in causes] == ["semantic/off-by-one", "trainer/autocast"]
    assert causes[0].evidence == "one late, and so does the trainer"
    assert joined([engine], trainer[1:]) == (engine, trainer[1])


@pytest.mark.parametrize(("delta", "mean"), [([0.1, -0.3], 0.2), ([0.1, -np.inf], None)])
def test_an_infinite_mean_is_not_written_down(delta, mean):
    assert _mean(np.array(delta)) == (None if mean is None else pytest.approx(mean))
