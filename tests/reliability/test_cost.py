"""What an audit costs beside the engine's own time: at most three scoring passes over the tokens that it judges."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from zerodrift.audit.prompts import generated
from zerodrift.audit.run import Audit
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request, SamplingParams
from zerodrift.records.codec import read_lines
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome

SEQUENCES, TOKENS, PASSES = 512, 64, 3
MOST_PASSES = 3.0

Clock = Callable[[], float]
CLOCKS: tuple[Clock, ...] = (time.perf_counter, time.process_time)


class Timed:
    """An engine with a stopwatch for what it does itself."""

    def __init__(self, inner: ReferenceBackend) -> None:
        self.inner = inner
        self.spent = [0.0, 0.0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers, spent = timed(lambda: self.inner.generate(requests))
        self.spent = [sum(pair) for pair in zip(self.spent, spent, strict=True)]
        return answers

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        scores, spent = timed(lambda: self.inner.score(sequences))
        self.spent = [sum(pair) for pair in zip(self.spent, spent, strict=True)]
        return scores


def timed(work: Callable[[], Any]) -> tuple[Any, list[float]]:
    """What `work` returns, and how long it took on each of CLOCKS."""
    began = [clock() for clock in CLOCKS]
    result = work()
    return result, [clock() - at for clock, at in zip(CLOCKS, began, strict=True)]


def one_pass(reference: ReferenceBackend, rollouts: Sequence[Rollout]) -> None:
    """Logprobs of every sampled token and nothing else, shortest first as an audit has them."""
    completions = sorted(
        (each.completion for each in rollouts if each.completion), key=lambda each: len(each.sequence)
    )
    sequences = [each.sequence for each in completions]
    starts = [len(each.prompt_token_ids) for each in completions]
    assert sum(map(len, reference.teacher.logprobs(sequences, starts))) == sum(
        len(each.token_ids) for each in completions
    )


@pytest.mark.long
def test_an_audit_takes_at_most_three_scoring_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = ReferenceBackend("testbed:qwen3")
    engine = Timed(ReferenceBackend("testbed:qwen3", dtype="float32"))
    audit = Audit(
        engine=engine,
        reference=reference,
        prompts=generated(reference.tokenizer, 512, 512, SEQUENCES, 0),
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        validation=ValidationConfig(num_prompts=SEQUENCES, equivalence_trials=SEQUENCES, max_tokens=TOKENS),
        precision=Precision.FP32,
        directory=tmp_path,
    )
    audited, spent = timed(audit.run)
    assert audited.record.verdict is Outcome.PASS
    rollouts = list(read_lines(tmp_path / ROLLOUTS, Rollout))
    passes = [timed(lambda: one_pass(reference, rollouts))[1] for _ in range(PASSES)]
    ratios = []
    for clock, name in enumerate(("wall", "processor")):
        own, alone = spent[clock] - engine.spent[clock], [each[clock] for each in passes]
        ratios.append(own / statistics.median(alone))
        with capsys.disabled():
            print(  # noqa: T201 - the figure is what this is for
                f"\n{name}: audit {own:.1f} s beside {engine.spent[clock]:.1f} s of the engine, one pass "
                f"{statistics.median(alone):.1f} s ({min(alone):.1f}…{max(alone):.1f}): {ratios[-1]:.2f} passes"
            )
    # On the processor's clock: on a busy machine the other one times its neighbours.
    assert ratios[1] <= MOST_PASSES
