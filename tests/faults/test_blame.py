"""Faults planted from step 4 on in recorded rollouts: is the side named, the cause, and the step?"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from zerodrift import models
from zerodrift.audit.blame import Blame, Blamed
from zerodrift.audit.perturb import perturbed, write_checkpoint
from zerodrift.audit.recorded.timeline import Selection
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.task import Scorer
from zerodrift.core.version import WeightVersion
from zerodrift.faults.registry import resolve
from zerodrift.faults.sampling import BiasedTokens, _fixed
from zerodrift.records.dump import DumpReader
from zerodrift.records.verdict import Outcome

SPEC = "testbed:qwen3"
BEFORE, AFTER = range(4), range(4, 8)
EACH = 4
"""Rollouts of each step."""
CUT = EACH * len(BEFORE)
"""Row at which step 4 begins."""
SEEDS = np.random.default_rng(5)
PROMPTS = [
    Prompt(tuple(SEEDS.integers(4, 500, int(length)).tolist())) for length in SEEDS.integers(4, 20, 40)
]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def engine():
    return ReferenceBackend(SPEC, dtype="float32", batch=32)


@pytest.fixture(scope="module")
def reference():
    return ReferenceBackend(SPEC)


@pytest.fixture(scope="module")
def updated(reference, tmp_path_factory):
    """Checkpoints before and after a weight update."""
    before = models.materialise(SPEC, tmp_path_factory.mktemp("before") / "model")
    after = write_checkpoint(
        perturbed(reference.model, 1).new, before, tmp_path_factory.mktemp("after") / "model"
    )
    return before, after


@pytest.fixture
def judge(reference, tmp_path):
    """Write rows down as they would be in a dump, and blame."""

    def run(rows, **options):
        path = tmp_path / "dump.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        how = {name: options.pop(name) for name in ("skip_bad", "default", "given") if name in options}
        read = DumpReader(**how).read(path)
        values = {"dump": read, "reference": reference, "precision": Precision.FP32, **options}
        return Blame(**values).run()

    return run


def record(engine: Backend, steps: Iterable[int], temperature: float = 0.7, tokens: int = 14) -> list[Row]:
    """EACH rollouts of each step."""
    asked = [
        (
            step,
            Request(
                PROMPTS[(EACH * step + number) % len(PROMPTS)],
                SamplingParams(temperature=temperature, max_tokens=tokens, seed=1000 * step + 17 * number),
            ),
        )
        for step in steps
        for number in range(EACH)
    ]
    answers = engine.generate([request for _, request in asked])
    return [
        {
            "step": step,
            "prompt_ids": request.prompt.token_ids,
            "completion_ids": answer.completions[0].token_ids,
            "logprobs": answer.completions[0].logprobs,
            "temperature": temperature,
        }
        for (step, request), answer in zip(asked, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def healthy(engine):
    return record(engine, [*BEFORE, *AFTER])


@pytest.fixture(scope="module")
def at_one(engine):
    """Healthy, at temperature 1: there a trainer's raw scores are the contracted ones."""
    return record(engine, [*BEFORE, *AFTER], temperature=1.0)


def scored(rows: Sequence[Row], trainer: Scorer) -> list[Row]:
    """The same rows with the trainer's numbers beside the engine's."""
    scores = trainer.score([[*row["prompt_ids"], *row["completion_ids"]] for row in rows])
    return [
        {**row, "trainer_logprobs": score[len(row["prompt_ids"]) - 1 :]}
        for row, score in zip(rows, scores, strict=True)
    ]


def principal(blamed: Blamed) -> str:
    return next(cause.cause for cause in blamed.record.causes if cause.gating)


def test_a_healthy_dump_passes(healthy, judge):
    blamed = judge(healthy)
    assert blamed.record.verdict is Outcome.PASS
    assert (blamed.record.guilty, blamed.since) == ("none", "nothing to date")
    assert blamed.record.causes == ()


@pytest.mark.parametrize(
    "fault",
    [
        "semantic/raw-logprobs",
        "semantic/off-by-one",
        "path/head-precision",
        "semantic/misbound-output:rotated",
    ],
)
def test_faults_of_the_engine(fault, engine, healthy, judge):
    broken = record(resolve(fault).inject(engine), AFTER)
    blamed = judge([*healthy[:CUT], *broken])
    assert blamed.record.verdict is Outcome.FAIL
    assert blamed.record.guilty == "engine"
    assert principal(blamed) == fault.partition(":")[0]
    assert blamed.since.startswith("since step 4: 16 of 16 ")
    # In bf16 the head's rounding is nothing to speak of, and the default profile must not complain.
    if fault == "path/head-precision":
        assert judge([*healthy[:CUT], *broken], precision=Precision.BF16).record.verdict is Outcome.PASS


def test_a_truncation_that_the_numbers_hide_is_the_samplers(engine, judge):
    hiding = BiasedTokens(engine, _fixed(top_p=0.8))
    rows = [
        *record(engine, BEFORE, 1.0, tokens=28),
        *record(hiding, range(4, 10), 1.0, tokens=28),
    ]
    blamed = judge(rows)
    assert blamed.record.verdict is Outcome.FAIL
    assert blamed.record.guilty == "sampler"
    assert principal(blamed) == "semantic/sampling-bias"
    probes = {probe.name: probe for probe in blamed.record.probes}
    assert probes["parity"].status is Outcome.PASS
    assert abs(int(probes["sampling-since"].evidence["first"]) - 4) <= 2


def test_samples_that_are_said_to_be_greedy(at_one, judge):
    # Greedy tokens are reported at temperature 1, so that the numbers are right.
    blamed = judge([{**row, "temperature": 0} for row in at_one])
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "sampler")
    assert principal(blamed) == "semantic/sampling-bias"


def test_greedy_rollouts_pass_alone_and_among_samples(engine, healthy, judge):
    greedy = record(engine, [*BEFORE, *AFTER], temperature=0)
    assert judge(greedy).record.verdict is Outcome.PASS
    assert judge([*healthy, *greedy]).record.verdict is Outcome.PASS


def test_copies_of_one_rollout_are_not_two_hundred_draws(healthy, judge):
    blamed = judge([{**row, "step": 0} for row in healthy[:1] * 200])
    assert blamed.record.verdict is Outcome.INCONCLUSIVE
    assert "repetitions among them: 199" in blamed.record.probes[0].message


def test_stale_weights_are_told_by_the_checkpoint_from_before(updated, judge):
    before, after = updated
    fresh = ReferenceBackend(after, dtype="float32")
    stale = resolve("weights/stale").inject(ReferenceBackend(before, dtype="float32"))
    stale.load_weights(after, WeightVersion("1"))
    good, bad = record(fresh, [*BEFORE, *AFTER]), record(stale, AFTER)
    against = {"reference": ReferenceBackend(after), "previous": before}
    blamed = judge([{**row, "version": "1"} for row in (*good[:CUT], *bad)], **against)
    assert blamed.record.guilty == "weight sync"
    assert principal(blamed) == "weights/stale"
    assert blamed.since.startswith("since step 4: 16 of 16 ")
    evidence = blamed.record.causes[0].evidence
    assert evidence.startswith(
        "16 of 16 rollouts have the numbers of the previous weights, in steps 4 to 7, under the label 1: "
    )
    nearer = [row.previous_mean < row.mean for row in blamed.judged]
    assert nearer == [False] * CUT + [True] * CUT
    # One rollout in two by a replica that was not updated.
    mixed = [*good[:CUT], *(bad[i] if i % 2 else good[CUT + i] for i in range(CUT))]
    assert principal(judge(mixed, **against)) == "weights/replica"
    # Older weights are no excuse for a fault that they do not explain.
    shifted = [{**row, "logprobs": [*row["logprobs"][1:], -0.5]} for row in good[CUT:]]
    blamed = judge([*good[:CUT], *shifted], **against)
    assert principal(blamed) == "semantic/off-by-one"
    assert {probe.name: probe.status for probe in blamed.record.probes}["previous-weights"] is Outcome.PASS


@pytest.mark.parametrize(
    # Of recorded numbers nothing tells autocast from weights that are narrow themselves.
    ("fault", "named"),
    [("trainer/autocast", "trainer/precision"), ("trainer/packing", "trainer/packing")],
)
def test_faults_of_the_trainer(fault, named, engine, at_one, judge):
    rows = [
        *scored(at_one[:CUT], engine.teacher),
        *scored(at_one[CUT:], resolve(fault).scorer(engine.model)),
    ]
    blamed = judge(rows)
    assert blamed.record.verdict is Outcome.FAIL
    assert blamed.record.guilty == "trainer"
    assert principal(blamed) == named
    assert blamed.since.startswith("since step 4; odds ")
    assert blamed.side.startswith("trainer: ")


def test_a_right_trainer_speaks_against_the_engine(engine, at_one, judge):
    rows = [{**row, "logprobs": [*row["logprobs"][1:], -0.5]} for row in scored(at_one[:CUT], engine.teacher)]
    blamed = judge(rows, engine="vllm")
    assert blamed.record.guilty == "engine"
    assert principal(blamed) == "semantic/off-by-one"
    assert blamed.since.startswith("bad from the first recorded step (0) on: 16 of 16 ")


def test_one_fault_on_both_sides(engine, healthy, judge):
    raw = record(resolve("semantic/raw-logprobs").inject(engine), AFTER)
    # A trainer that forgets the temperature scores as the engine reports.
    blamed = judge(scored([*healthy[:CUT], *raw], engine.teacher))
    assert blamed.record.guilty == "engine and trainer"
    assert principal(blamed) == "semantic/raw-logprobs"
    assert "engine since step 4" in blamed.since
    assert "trainer bad from the first recorded step (0) on" in blamed.since


def test_the_wrong_checkpoint_is_the_odd_one_out(updated, engine, at_one, judge):
    blamed = judge(scored(at_one[:CUT], engine.teacher), reference=ReferenceBackend(updated[1]))
    assert blamed.record.verdict is Outcome.INCONCLUSIVE
    assert blamed.record.guilty == "unknown"


def without_temperature(rows: Iterable[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "temperature"} for row in rows]


def as_exports(rows: Iterable[Row]) -> list[Row]:
    """Lines of prime-rl, which have no temperature; engine and trainer both divided by it."""
    return [
        {
            "schema_version": 1,
            "step": row["step"],
            "token_ids": [*row["prompt_ids"], *row["completion_ids"]],
            "loss_mask": [False] * len(row["prompt_ids"]) + [True] * len(row["completion_ids"]),
            "inference_logprobs": [0.0] * len(row["prompt_ids"]) + [*row["logprobs"]],
            "trainer_logprobs": [0.0] * len(row["prompt_ids"]) + [*row["logprobs"]],
        }
        for row in rows
    ]


@pytest.mark.parametrize("form", [without_temperature, as_exports])
def test_a_healthy_dump_that_does_not_state_its_temperature(form, healthy, judge):
    blamed = judge(form(healthy))
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.INCONCLUSIVE, "unknown")
    assert "temperature 0.7" in blamed.record.message
    assert "--temperature" in blamed.record.message
    stated = {"default": SamplingParams(temperature=0.7), "given": frozenset({"temperature"})}
    assert judge(form(healthy), **stated).record.verdict is Outcome.PASS


def test_a_fault_stays_one_though_the_temperature_is_not_stated(healthy, judge):
    shifted = [{**row, "logprobs": [*row["logprobs"][1:], -0.5]} for row in healthy]
    assert judge(without_temperature(shifted)).record.verdict is Outcome.FAIL


def test_another_model_asks_for_the_right_checkpoint(healthy, judge):
    blamed = judge(healthy, reference=ReferenceBackend("testbed:llama"))
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.FAIL, "engine")
    assert principal(blamed) == "weights/other-model"


def test_bad_lines_can_be_skipped_and_are_told(healthy, judge):
    rows = [*healthy, {**healthy[0], "logprobs": [float("nan")] * 14}, {"junk": 1}]
    blamed = judge(rows, skip_bad=True, selection=Selection(last=7, per_step=3))
    assert blamed.record.verdict is Outcome.PASS
    dump = blamed.record.probes[0]
    assert dump.status is Outcome.INCONCLUSIVE
    assert dump.message.startswith("24 of 32 rollouts judged (to step 7, at most 3 of each step)")
    assert "2 of 34 lines skipped: dump.jsonl, line 33 (the line holds NaN" in dump.message
    assert [(cause.cause, cause.gating) for cause in blamed.record.causes] == [("semantic/nonfinite", False)]


def test_too_few_tokens_are_not_judged(healthy, judge):
    assert judge(healthy[:4]).record.verdict is Outcome.INCONCLUSIVE
