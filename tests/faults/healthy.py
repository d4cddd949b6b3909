"""Thousands of cheap audits of engines that are healthy: none may fail, and p-values must be uniform.

    python tests/faults/healthy.py [--runs 3000]        # appends to docs/healthy.jsonl; goes on where it stopped

A cheap run is the part of an audit that judges numbers and samples, on tokens of its own: gates relative to a measured
floor, parity, and the four tests of the samples. What is shared between runs is the floor, and the forward: many runs
are sampled and scored in one batch, in which the numbers of one do not depend on those of another.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from scipy import stats

from zerodrift.audit.decide import Circumstances, decide
from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.probes.parity import parity, samples
from zerodrift.audit.prompts import generated
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core.request import SamplingParams
from zerodrift.drift.gates import gates_for
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.verdict import Outcome

RESULTS = Path(__file__).parents[2] / "docs" / "healthy.jsonl"
MODELS = ("testbed:llama", "testbed:qwen2", "testbed:qwen3", "testbed:mistral")
SAMPLINGS = (
    SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.7, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, ignore_eos=True),
)
TRIALS = 10
"""Sequences of a run."""
AT_ONCE = 50
"""Runs that are sampled and scored together."""
TESTS = {
    "how likely the tokens are": "p_surprise",
    "their places among likelier ones": "p_rank",
    "their places among all ids": "p_id",
    "whether one draw says something about the next": "p_serial",
}


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Some runs on one model."""

    model: str
    first_seed: int
    runs: int
    tokens_per_run: int
    failed: int
    doubted: int
    p_values: dict[str, list[float]]

    @staticmethod
    def uniform(values: Sequence[float]) -> float:
        """p of Kolmogorov and Smirnov's test against the uniform distribution."""
        return float(stats.kstest(values, "uniform").pvalue)


def read(path: Path) -> list[Tally]:
    """What was measured."""
    return list(read_lines(path, Tally))


def tally(model: str, first_seed: int, runs: int) -> Tally:
    """`runs` cheap audits with seeds of their own."""
    engine, reference = ExactBackend(model), ReferenceBackend(model, batch=64)
    sampling = SAMPLINGS[first_seed // AT_ONCE % len(SAMPLINGS)]
    prompts = generated(reference.tokenizer, reference.facts.vocab_size, 40, TRIALS, first_seed)
    requests = [
        request
        for run in range(runs)
        for request in parity_requests(prompts, sampling, TRIALS, 100_000 * (first_seed + run + 1))
    ]
    observed = [
        Observed(completion, request.sampling)
        for request, answer in zip(requests, engine.generate(requests), strict=True)
        for completion in answer.completions
    ]
    measured = measure(reference.teacher, observed, reference.facts.eos_token_ids)
    floor = measure_floor(reference.model, some_of([item.passage for item in observed[:TRIALS]]), "float32")
    gates = gates_for(PROFILES[Precision.FP32].gate, floor)
    verdicts: list[Outcome] = []
    p_values: dict[str, list[float]] = {name: [] for name in TESTS}
    for run in range(runs):
        table = tabulate(measured[run * TRIALS : (run + 1) * TRIALS], floor)
        drawn = samples(table, greedy=False)
        numbers = parity(table, gates, np.random.default_rng(run))
        verdicts.append(decide([numbers, drawn], (), Circumstances()).verdict)
        for name, key in TESTS.items():
            if key in drawn.record.evidence:
                p_values[name].append(float(drawn.record.evidence[key]))
    return Tally(
        model=model,
        first_seed=first_seed,
        runs=runs,
        tokens_per_run=TRIALS * sampling.max_tokens,
        failed=verdicts.count(Outcome.FAIL),
        doubted=verdicts.count(Outcome.INCONCLUSIVE),
        p_values=p_values,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    done = {each.first_seed for each in read(options.out)} if options.out.exists() else set()
    with LineWriter[Tally](options.out) as writer:
        for number in range(-(-options.runs // AT_ONCE)):
            if (seed := number * AT_ONCE) in done:
                continue
            found = tally(MODELS[number % len(MODELS)], seed, AT_ONCE)
            writer.write(found)
            sys.stdout.write(
                f"{seed + AT_ONCE:5d} runs: {found.failed} failed, {found.doubted} doubted ({found.model})\n"
            )
            sys.stdout.flush()
    return 1 if any(each.failed for each in read(options.out)) else 0


if __name__ == "__main__":
    sys.exit(main())
