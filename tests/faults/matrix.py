"""Every planted fault on every model it applies to: was it detected, and was it named? Makes docs/faults.md.

    make faults-full                                               # all of it; writes docs/faults.md
    python tests/faults/matrix.py --models testbed:qwen3 --faults path/rope:theta-doubled --out some.jsonl

Resumable: rows that the file holds are not run again. The page is a function of docs/faults.jsonl.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from zerodrift import models
from zerodrift.audit.prompts import generated
from zerodrift.audit.run import Audit
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.cause import Layer
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.sampling import write_model_with_defaults
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.verdict import VerdictRecord

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "faults.jsonl", ROOT / "docs" / "faults.md"
HEAD = """# Planted faults, and what the audit said

Written by `make faults-full`: every injector (`zerodrift audit --inject list`) planted in an engine that is otherwise
the reference in fp32, on {models}. A fault that a model has no part for (no sliding window, no tied head) is not planted
there. Causes that the data of one audit cannot tell apart count as one; [attribution.md](attribution.md) says which.

**Detected {detected} of {total}; principal cause right {right} of {total}.** A run took {median:.1f} s at the median,
{longest:.1f} s at most, two at a time on two cores.

| fault | what it does | detected | named | otherwise named |
|---|---|---|---|---|
"""

TESTBEDS = ("testbed:llama", "testbed:qwen2", "testbed:qwen3", "testbed:mistral")
VALIDATION = ValidationConfig(num_prompts=24, equivalence_trials=32, max_tokens=24)
# What only the samples show needs more of them: of a nucleus of 0.95 that reports its full mass, 1,200 to 2,300 tokens.
MANY_SAMPLES = ValidationConfig(num_prompts=24, equivalence_trials=96, max_tokens=32)
SAMPLES_ONLY = ("semantic/truncation-mass:top-p-0.95-full-mass", "semantic/sampling-bias:hotter-1.2")
"""Faults that leave every reported number right."""
SAMPLING = SamplingParams(temperature=0.7)

# Causes that the data of one audit cannot tell apart; docs/attribution.md says why, and which probe would.
EQUIVALENT = (
    frozenset({"weights/stale", "weights/version-label"}),
    frozenset({"semantic/temperature", "semantic/raw-logprobs"}),
    frozenset({"path/body-precision", "weights/dtype"}),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on one model."""

    fault: str
    model: str
    verdict: str
    found: tuple[str, ...]
    """Gating causes, principal first, then the others."""
    listed: tuple[str, ...] = ()
    says: str = ""
    seconds: float = 0.0


def judge(
    engine: Backend,
    reference: ReferenceBackend,
    scratch: Path,
    size: ValidationConfig = VALIDATION,
    **options: Any,
) -> VerdictRecord:
    """The verdict on an engine, healthy or not, by an audit of this size."""
    prompts = generated(reference.tokenizer, reference.facts.vocab_size, 200, size.num_prompts, size.seed)
    settings = {"precision": Precision.FP32, **options}
    audit = Audit(
        engine=engine,
        reference=reference,
        prompts=prompts,
        sampling=msgspec.structs.replace(SAMPLING, max_tokens=size.max_tokens),
        validation=size,
        directory=scratch,
        **settings,
    )
    return audit.run().record


def run_fault(fault: Fault, spec: str, scratch: Path, size: ValidationConfig | None = None) -> Row | None:
    """Audit an engine with the fault; None where it does not apply to the model."""
    if size is None:
        size = MANY_SAMPLES if fault.spec in SAMPLES_ONLY else VALIDATION
    if Need.GENERATION_DEFAULTS in fault.needs:
        spec_path = str(write_model_with_defaults(spec, scratch / "model"))
    else:
        spec_path = spec
    sync = Need.SYNC in fault.needs
    checkpoint = None
    if sync:
        checkpoint = (
            Path(spec) if not spec.startswith("testbed:") else models.materialise(spec, scratch / "model")
        )
        spec_path = str(checkpoint)
    reference = ReferenceBackend(spec_path)
    healthy = ReferenceBackend(spec_path, dtype="float32")
    trainer = None
    try:
        if fault.kind is Layer.TRAINER:
            engine, trainer = healthy, fault.scorer(models.load(spec_path))
        else:
            engine = fault.inject(healthy)
    except (InvalidValue, CapabilityMissing):
        return None
    began = time.monotonic()
    resets = fault.variant != "kept"
    record = judge(
        engine, reference, scratch, size, trainer=trainer, checkpoint=checkpoint, resets_cache=resets
    )
    engine.close()
    return Row(
        fault=fault.spec,
        model=spec,
        verdict=record.verdict.value,
        found=tuple(cause.cause for cause in record.causes if cause.gating),
        listed=tuple(cause.cause for cause in record.causes if not cause.gating),
        says=record.causes[0].evidence if record.causes else record.says,
        seconds=round(time.monotonic() - began, 2),
    )


def named(row: Row) -> bool:
    """The principal cause is the planted one, or one that cannot be told from it."""
    planted = row.fault.split(":")[0]
    first = (row.found or row.listed or ("",))[0]
    return first == planted or any({first, planted} <= group for group in EQUIVALENT)


def page(rows: Sequence[Row]) -> str:
    """The document for these results."""
    by_fault: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_fault[row.fault].append(row)
    head = HEAD.format(
        models=", ".join(sorted({row.model for row in rows})),
        total=len(rows),
        detected=sum(row.verdict == "FAIL" for row in rows),
        right=sum(named(row) for row in rows),
        median=statistics.median(row.seconds for row in rows),
        longest=max(row.seconds for row in rows),
    )
    return head + "".join(_line(name, by_fault[name]) for name in sorted(by_fault))


def _line(name: str, rows: Sequence[Row]) -> str:
    found = sum(row.verdict == "FAIL" for row in rows)
    wrong = [
        f"{row.model}: {f'`{row.found[0]}`' if row.found else row.verdict}" for row in rows if not named(row)
    ]
    right = len(rows) - len(wrong)
    return f"| `{name}` | {FAULTS[name].says} | {found}/{len(rows)} | {right}/{len(rows)} | {'; '.join(wrong)} |\n"


def run_one(name: str, spec: str) -> Row | None:
    """One fault on one model, in a scratch directory of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        return run_fault(FAULTS[name], spec, Path(scratch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(TESTBEDS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row.fault, row.model) for row in read_lines(options.out, Row)} if options.out.exists() else set()
    asked = [(name, spec) for spec in options.models for name in options.faults]
    todo = [(name, spec) for name, spec in asked if (FAULTS[name].spec, spec) not in done]
    spawn = multiprocessing.get_context("spawn")  # torch does not survive a fork
    with (
        LineWriter[Row](options.out) as writer,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
    ):
        for future in as_completed([pool.submit(run_one, *pair) for pair in todo]):
            if (row := future.result()) is None:
                continue
            writer.write(row)
            mark = "ok " if named(row) else "???"
            sys.stdout.write(
                f"{mark} {row.seconds:5.1f}s {row.model:16} {row.fault:42} {row.verdict:12} "
                f"{row.found} {row.listed} | {row.says[:110]}\n"
            )
            sys.stdout.flush()
    if options.out == RESULTS:
        PAGE.write_text(page(list(read_lines(RESULTS, Row))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
