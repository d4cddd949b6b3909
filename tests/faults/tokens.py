"""How many sampled tokens a planted fault takes to be seen, on weights that were trained.

    python tests/faults/tokens.py [--models warmed .cache/smollm2]     # appends to docs/tokens.jsonl; goes on where it stopped

An engine with the fault is sampled once. Its sequences are then read in many random orders, and each order ends where
the contract, parity or the test of the samples says FAIL. Faults of updates and of trainers are left out, and so is
what only an engine compared with itself shows: those probes have a size of their own.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from matrix import ROOT, SAMPLES_ONLY, SAMPLING, SMOLLM2, longest_prompt

from zerodrift import models
from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.measure import Measurement, Observed, measure, tabulate
from zerodrift.audit.observe import observe
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.probes import parity as judged
from zerodrift.audit.probes.contract import contract, readable
from zerodrift.audit.prompts import generated
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.model import Device
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core.cause import Layer
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.drift.floor import Floor
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.sampling import write_model_with_defaults
from zerodrift.models.warmup import warm_up
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome

RESULTS = ROOT / "docs" / "tokens.jsonl"
WARMED = "warmed testbed:qwen3"
MODELS = (WARMED, SMOLLM2)
PROMPTS, OUTPUT = 24, 16
SEQUENCES = 48
MANY_SEQUENCES = 256
"""For what only the samples show: 4,096 tokens."""
ORDERS = 200
GROWTH = 1.1
"""Each look has a tenth more sequences than the one before."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on one model."""

    fault: str
    model: str
    sampled: int
    """Tokens that there were."""
    median: int | None
    p95: int | None
    """None where so many orders ended without a FAIL."""


class Evidence(msgspec.Struct, frozen=True):
    """What was sampled and scored once, to be read in any order."""

    engine: str
    reference: ReferenceBackend
    rollouts: Sequence[Rollout]
    measured: dict[int, Measurement]
    """By place in `rollouts`; those without a completion have none."""
    floor: Floor
    gates: judged.Gates

    def fails(self, places: Sequence[int]) -> bool:
        """Whether an audit of these sequences alone would say FAIL."""
        if _failed(contract([self.rollouts[place] for place in places], self.engine, self.reference.facts)):
            return True
        measured = [self.measured[place] for place in places if place in self.measured]
        if not measured:
            return False
        table = tabulate(measured, self.floor)
        rng = np.random.default_rng(0)
        return _failed(judged.parity(table, self.gates, rng)) or _failed(judged.fidelity(table))

    def needed(self, rng: np.random.Generator) -> int | None:
        """Tokens read in one random order until it fails."""
        order, count = rng.permutation(len(self.rollouts)).tolist(), 1
        while count <= len(order):
            if self.fails(order[:count]):
                return sum(self.tokens(place) for place in order[:count])
            count = max(count + 1, int(count * GROWTH))
        return None

    def tokens(self, place: int) -> int:
        """Length of one output; one that could not be read counts as if it were whole."""
        completion = self.rollouts[place].completion
        return OUTPUT if completion is None else len(completion.token_ids)


def _failed(result: judged.ProbeResult) -> bool:
    return result.record.status is Outcome.FAIL


def applies(fault: Fault) -> bool:
    """Whether sampling alone can show it."""
    return fault.kind is not Layer.TRAINER and not {Need.SYNC, Need.STREAM} & set(fault.needs)


def sample(
    engine: Backend, reference: ReferenceBackend, sequences: int, longest: int, scratch: Path
) -> Evidence:
    """Everything that is asked of the engine, and the reference's word on it."""
    prompts = generated(reference.tokenizer, reference.facts.vocab_size, longest, PROMPTS, 0)
    requests = parity_requests(prompts, msgspec.structs.replace(SAMPLING, max_tokens=OUTPUT), sequences, 0)
    rollouts = observe(engine, requests, "parity", scratch / "rollouts.jsonl", lambda done, total: None)
    rollouts = [readable(rollout, reference.facts.vocab_size) for rollout in rollouts]
    observed = {
        place: Observed(rollout.completion, rollout.request.sampling)
        for place, rollout in enumerate(rollouts)
        if rollout.completion is not None and rollout.completion.token_ids
    }
    floor = measure_floor(reference.model, some_of([item.passage for item in observed.values()]), "float32")
    measured = measure(reference.teacher, list(observed.values()), reference.facts.eos_token_ids)
    gates = judged.gates_for(PROFILES[Precision.FP32].gate, floor)
    return Evidence(
        engine.name, reference, rollouts, dict(zip(observed, measured, strict=True)), floor, gates
    )


def detect(name: str, model: str, directory: str, device: Device) -> Detection | None:
    """One fault on the model in `directory`; None where it does not apply."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as scratch:
        if Need.GENERATION_DEFAULTS in fault.needs:
            directory = str(write_model_with_defaults(directory, Path(scratch) / "model"))
        try:
            engine = fault.inject(ReferenceBackend(directory, dtype="float32", device=device))
        except (InvalidValue, CapabilityMissing):
            return None
        sequences = MANY_SEQUENCES if name in SAMPLES_ONLY else SEQUENCES
        reference, longest = ReferenceBackend(directory, device=device), longest_prompt([fault], model)
        evidence = sample(engine, reference, sequences, longest, Path(scratch))
    rng = np.random.default_rng(0)
    # The audit itself refuses to judge fewer than 200 tokens; how few carry the evidence is the question here.
    with patch.object(judged, "LEAST_TOKENS", 2):
        needed = [evidence.needed(rng) for _ in range(ORDERS)]
    return Detection(
        fault=name,
        model=model,
        sampled=sum(evidence.tokens(place) for place in range(len(evidence.rollouts))),
        median=_quantile(needed, 0.5),
        p95=_quantile(needed, 0.95),
    )


def _quantile(needed: Sequence[int | None], share: float) -> int | None:
    """The least number that this share of the orders did not exceed."""
    ordered = sorted(needed, key=lambda tokens: (tokens is None, tokens))
    return ordered[int(np.ceil(share * len(ordered))) - 1]


def write_warmed(directory: Path) -> Path:
    """A built-in model that was taught to add."""
    path = models.materialise("testbed:qwen3", directory)
    model = models.load(str(path))
    warm_up(model, models.tokenizer(str(path)))
    model.save_pretrained(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument(
        "--faults", nargs="*", default=[name for name, fault in FAULTS.items() if applies(fault)]
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where models compute")
    options = parser.parse_args()
    done = (
        {(row.fault, row.model) for row in read_lines(options.out, Detection)}
        if options.out.exists()
        else set()
    )
    todo = [(name, model) for model in options.models for name in options.faults if (name, model) not in done]
    spawn = multiprocessing.get_context("spawn")  # torch does not survive a fork
    with (
        tempfile.TemporaryDirectory() as scratch,
        LineWriter[Detection](options.out) as writer,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
    ):
        directories = {SMOLLM2: str(ROOT / SMOLLM2)}
        if any(model == WARMED for _, model in todo):
            directories[WARMED] = str(write_warmed(Path(scratch) / "warmed"))
        futures = [pool.submit(detect, *pair, directories[pair[1]], options.device) for pair in todo]
        for future in as_completed(futures):
            if (row := future.result()) is None:
                continue
            writer.write(row)
            sys.stdout.write(
                f"{row.model:22} {row.fault:46} median {row.median} p95 {row.p95} of {row.sampled}\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
