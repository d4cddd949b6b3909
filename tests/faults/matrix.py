"""Every planted fault on every model it applies to, and pairs of them: was it detected, and was it named?

    make faults-full                                               # all of it; writes docs/faults.md
    python tests/faults/matrix.py --models testbed:qwen3 --faults path/rope:theta-doubled --out some.jsonl
    python tests/faults/matrix.py --faults 'semantic/raw-logprobs:default + path/rope:theta-doubled' --out some.jsonl

Resumable: rows that the file holds are not run again. Each names the code it came from, and the page, which is a
function of docs/faults.jsonl, says so where that was not always the same.
"""

import argparse
import functools
import hashlib
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from zerodrift import models
from zerodrift.audit.prompts import generated
from zerodrift.audit.run import Audit
from zerodrift.backends.base import Backend
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.model import Device
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.cause import Layer
from zerodrift.core.errors import CapabilityMissing, InvalidValue
from zerodrift.core.request import SamplingParams
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS
from zerodrift.faults.sampling import write_model_with_defaults
from zerodrift.models.placing import place
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.verdict import VerdictRecord

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "faults.jsonl"
SMOLLM2 = ".cache/smollm2"
TESTBEDS = ("testbed:llama", "testbed:qwen2", "testbed:qwen3", "testbed:mistral")
VALIDATION = ValidationConfig(num_prompts=24, equivalence_trials=32, max_tokens=24)
# What only the samples show needs more of them: of a nucleus of 0.95 that reports its full mass, 1,200 to 2,300 tokens.
MANY_SAMPLES = ValidationConfig(num_prompts=24, equivalence_trials=96, max_tokens=32)
FEW_TOKENS = ValidationConfig(num_prompts=12, equivalence_trials=16, max_tokens=16)
"""For trained weights of 135 million parameters: a token costs sixty times as much there."""
LONGEST_PROMPT, LONGEST_TRAINED, BEYOND_A_PAGE = 200, 24, 72
"""On built-in models, and on trained weights: as few as do, or beyond position 64 where a fault begins there."""
TRAINED_CONTEXT = 96
"""Keeps the prompts of probes short on trained weights."""
SAMPLES_ONLY = ("semantic/sampling-bias:top-p-0.95", "semantic/sampling-bias:hotter-1.2")
"""Faults that leave every reported number right."""
AT_THE_END = ("semantic/eos:no-logprob", "semantic/eos:dropped")
"""Faults of a token that models without training sample once in 512: some outputs must end by themselves."""
SAMPLING = SamplingParams(temperature=0.7)

# Causes that the data of one audit cannot tell apart; docs/attribution.md says why, and which probe would.
EQUIVALENT = (
    frozenset({"weights/stale", "weights/version-label"}),
    frozenset({"semantic/temperature", "semantic/raw-logprobs"}),
    frozenset({"path/body-precision", "weights/dtype"}),
    frozenset({"path/chunked-prefill", "path/context-boundary"}),
)


# Two at once, of different layers and of the same. What hides is beneath what rewrites numbers, and both must be named.
PAIRS = (
    ("semantic/raw-logprobs:default", "path/rope:theta-doubled"),
    ("semantic/raw-logprobs:default", "path/weight-quantisation:4-bit"),
    ("semantic/raw-logprobs:default", "path/body-precision:bf16"),
    ("semantic/raw-logprobs:default", "semantic/penalty:repetition-1.05"),
    ("semantic/raw-logprobs:default", "semantic/bos:missing"),
    ("semantic/raw-logprobs:default", "weights/stale:nothing"),
    ("semantic/temperature:0.9-instead", "path/context-boundary:page-16"),
    ("semantic/temperature:0.9-instead", "path/kv-precision:fp8"),
    ("semantic/temperature:0.9-instead", "semantic/penalty:presence-0.5"),
    ("semantic/temperature:0.9-instead", "semantic/template:newline-lost"),
    ("semantic/temperature:0.9-instead", "weights/partial:middle-layer"),
    ("semantic/truncation-mass:top-k-20", "path/rope:positions-stretched"),
    ("semantic/truncation-mass:top-k-20", "semantic/penalty:frequency-0.3"),
    ("semantic/penalty:repetition-1.05", "path/rope:theta-of-another-family"),
    ("semantic/bos:missing", "path/context-boundary:page-64"),
    ("semantic/off-by-one:shifted-left", "path/rope:theta-doubled"),
    ("semantic/wrong-token:likeliest", "path/rope:theta-doubled"),
    ("semantic/nonfinite:nan", "path/rope:theta-doubled"),
    ("semantic/seed:shared", "semantic/temperature:ignored"),
    ("trainer/autocast:bf16", "semantic/raw-logprobs:default"),
    ("trainer/packing:leak", "path/rope:theta-doubled"),
    ("weights/stale-prefix-cache:kept", "semantic/raw-logprobs:default"),
    ("weights/swapped:gate-up", "semantic/temperature:0.9-instead"),
    ("path/prefix-cache:misaligned", "semantic/penalty:repetition-1.05"),
)
PAIRED_ON = ("testbed:llama", "testbed:qwen3")
AND = " + "


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, or two, on one model."""

    fault: str
    """As in the registry; two are joined by a plus."""
    model: str
    verdict: str
    found: tuple[str, ...]
    """Gating causes, principal first, then the others."""
    listed: tuple[str, ...] = ()
    says: str = ""
    seconds: float = 0.0
    """Of processor time, one thread: the clock on the wall would time the neighbours too."""
    device: str = "cpu"
    """Where both sides computed."""
    code: str = ""
    """Which state of the package said so."""


@functools.cache
def code() -> str:
    """A digest of the package's source."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "zerodrift").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def judge(
    engine: Backend,
    reference: ReferenceBackend,
    scratch: Path,
    size: ValidationConfig = VALIDATION,
    longest: int = LONGEST_PROMPT,
    *,
    smallest: bool = False,
    **options: Any,
) -> VerdictRecord:
    """The verdict on an engine, healthy or not, by an audit of this size.

    The page times audits with their smallest case, a fifth of it all; tests that look at no case go without.
    """
    prompts = generated(reference.tokenizer, reference.facts.vocab_size, longest, size.num_prompts, size.seed)
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
    return (audit.run() if smallest else audit.judge()[0]).record


def run_faults(
    faults: Sequence[Fault],
    spec: str,
    scratch: Path,
    size: ValidationConfig | None = None,
    device: Device = "cpu",
    *,
    smallest: bool = False,
) -> Row | None:
    """Audit an engine with the faults; None where one does not apply to the model."""
    trained = spec == SMOLLM2
    if size is None:
        size = FEW_TOKENS if trained else VALIDATION
        if any(fault.spec in (*SAMPLES_ONLY, *AT_THE_END) for fault in faults):
            size = MANY_SAMPLES
    needs = {need for fault in faults for need in fault.needs}
    checkpoint = None
    if Need.GENERATION_DEFAULTS in needs:
        spec_path = str(write_model_with_defaults(spec, scratch / "model"))
    elif Need.SYNC in needs:
        checkpoint = (
            models.materialise(spec, scratch / "model") if spec.startswith("testbed:") else ROOT / spec
        )
        spec_path = str(checkpoint)
    else:
        spec_path = spec
    reference = ReferenceBackend(spec_path, device=device)
    # The reference does not stream.
    kind: Callable[..., Backend] = (
        ExactBackend if Need.STREAM in needs else functools.partial(ReferenceBackend, device=device)
    )
    engine = kind(spec_path, dtype="float32")
    if trained:
        engine.max_model_len = TRAINED_CONTEXT
    trainer = None
    try:
        # What acts inside the engine is planted before what wraps it.
        for fault in sorted(faults, key=lambda fault: not {Need.REFERENCE, Need.INSIDE} & set(fault.needs)):
            if fault.kind is Layer.TRAINER:
                trainer = fault.scorer(place(models.load(spec_path), device))
            else:
                engine = fault.inject(engine)
    except (InvalidValue, CapabilityMissing):
        return None
    began = time.process_time()
    resets = all(fault.variant != "kept" for fault in faults)
    record = judge(
        engine,
        reference,
        scratch,
        size,
        longest_prompt(faults, spec),
        smallest=smallest,
        trainer=trainer,
        checkpoint=checkpoint,
        resets_cache=resets,
    )
    engine.close()
    return Row(
        fault=AND.join(fault.spec for fault in faults),
        model=spec,
        verdict=record.verdict.value,
        found=tuple(cause.cause for cause in record.causes if cause.gating),
        listed=tuple(cause.cause for cause in record.causes if not cause.gating),
        says=record.causes[0].evidence if record.causes else record.message,
        seconds=round(time.process_time() - began, 2),
        device=device,
        code=code(),
    )


def longest_prompt(faults: Sequence[Fault], spec: str) -> int:
    """Tokens; on trained weights no more than it takes."""
    if spec != SMOLLM2:
        return LONGEST_PROMPT
    late = any(fault.cause in ("path/context-boundary", "trainer/positions") for fault in faults)
    return BEYOND_A_PAGE if late else LONGEST_TRAINED


def named(row: Row) -> bool:
    """One fault: the principal cause is it, or cannot be told from it. Two: both are among the gating causes."""
    planted = [spec.split(":")[0] for spec in row.fault.split(AND)]
    if row.verdict != "FAIL":
        return False
    if len(planted) == 1:
        return _same(planted[0], (row.found or ("",))[0])
    return all(any(_same(one, found) for found in row.found) for one in planted)


def _same(planted: str, found: str) -> bool:
    return planted == found or any({planted, found} <= group for group in EQUIVALENT)


def run_one(name: str, spec: str, device: Device = "cpu") -> Row | None:
    """One fault or pair on one model, in a scratch directory of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        faults = [FAULTS[part] for part in name.split(AND)]
        return run_faults(faults, spec, Path(scratch), device=device, smallest=True)


def everything() -> list[tuple[str, str]]:
    """What docs/faults.md is made of."""
    audited = [name for name, fault in FAULTS.items() if Need.IN_FLIGHT not in fault.needs]
    single = [(name, spec) for spec in (*TESTBEDS, SMOLLM2) for name in audited]
    return single + [(AND.join(pair), spec) for spec in PAIRED_ON for pair in PAIRS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", help="default: all of them")
    parser.add_argument("--faults", nargs="*", help="default: all of them, and the pairs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where models compute")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row.fault, row.model) for row in read_lines(options.out, Row)} if options.out.exists() else set()
    asked = everything()
    if options.faults is not None:
        asked = [(name, spec) for spec in options.models or TESTBEDS for name in options.faults]
    elif options.models is not None:
        asked = [(name, spec) for name, spec in asked if spec in options.models]
    todo = [pair for pair in asked if pair not in done]
    broken = 0
    spawn = multiprocessing.get_context("spawn")  # torch does not survive a fork
    with (
        LineWriter[Row](options.out) as writer,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
    ):
        futures = {pool.submit(run_one, *pair, options.device): pair for pair in todo}
        for future in as_completed(futures):
            name, model = futures[future]
            if (error := future.exception()) is not None:
                # The others go on; this one is run again the next time.
                broken += 1
                sys.stdout.write(f"!!        {model:16} {name:42} {type(error).__name__}: {error}\n")
                traceback.print_exception(error)
                continue
            if (row := future.result()) is None:
                sys.stdout.write(f"--        {model:16} {name:42} does not apply\n")
                continue
            writer.write(row)
            mark = "ok " if named(row) else "???"
            sys.stdout.write(
                f"{mark} {row.seconds:5.1f}s {row.model:16} {row.fault:42} {row.verdict:12} "
                f"{row.found} {row.listed} | {row.says[:110]}\n"
            )
            sys.stdout.flush()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
