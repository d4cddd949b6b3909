"""Real vLLM on a GPU, audited: are its faults named there too, and does what is printed mend them?

    python tests/gpu/vllm_on_cuda.py --python PYTHON --out DIR [--env NAME=VALUE ...] [--only NAME ...]

Starts one server after the other in PYTHON's environment and audits it; a line of JSON per audit says what came out,
and the exit code is 1 where that is not what EXPECTED says. The reference is on the GPU as well.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from zerodrift import models
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.vllm_launch import flags, launch_vllm, transfer_flags
from zerodrift.config.load import load
from zerodrift.core.errors import ZerodriftError
from zerodrift.records.verdict import Outcome, ProbeRecord, VerdictRecord

CONSISTENCY = ("repeat", "batch", "cache", "stream", "prefill-decode")
COOL = "sampling_defaults.temperature=0.7"
BASE = (
    "engine.name=vllm",
    "engine.logprobs_mode=processed_logprobs",
    "engine.generation_config=vllm",
    "engine.enable_prefix_caching=true",
    "engine.async_scheduling=null",
    "engine.enforce_eager=true",
    "engine.max_model_len=1024",
    "engine.gpu_memory_utilization=0.3",
    "validation.num_prompts=32",
    "validation.equivalence_trials=64",
    "validation.max_tokens=32",
)


class Asked(NamedTuple):
    """One audit of a running server, and what must come out."""

    name: str
    verdict: str
    cause: str | None = None
    changes: tuple[str, ...] = ()
    sync: bool = False
    resets_cache: bool = True
    every_bit: bool = False


class ServedModel(NamedTuple):
    """A server, and what it is asked."""

    name: str
    changes: tuple[str, ...]
    asked: tuple[Asked, ...]


BF16, FP32 = "model.dtype=bfloat16", "model.dtype=float32"
INVARIANT = "engine.env={VLLM_BATCH_INVARIANT: '1'}"
EXPECTED = (
    ServedModel(
        "bf16",
        (BF16,),
        (
            Asked("healthy", "PASS"),
            Asked("cool", "PASS", changes=(COOL,)),
            Asked("update", "PASS", sync=True),
            Asked("stale", "FAIL", "weights/stale-prefix-cache", sync=True, resets_cache=False),
        ),
    ),
    # As it comes: compiled, with CUDA graphs, raw logprobs.
    ServedModel(
        "default",
        (BF16, "engine.logprobs_mode=raw_logprobs", "engine.enforce_eager=false"),
        (Asked("raw", "FAIL", "semantic/raw-logprobs", changes=(COOL,)),),
    ),
    ServedModel("head", (BF16, "engine.head_dtype=float32"), (Asked("head", "PASS"),)),
    # FlashAttention 3 tiles by the number of queries, whatever this variable says; Triton's kernel does not.
    ServedModel("invariant", (BF16, INVARIANT), (Asked("invariant", "PASS"),)),
    ServedModel(
        "invariant-triton",
        (BF16, INVARIANT, "engine.args=[--attention-backend, TRITON_ATTN]"),
        (Asked("invariant-triton", "PASS", every_bit=True),),
    ),
    # Only Triton's and Flex attention take fp32, and Triton multiplies in TF32 unless told otherwise.
    ServedModel("fp32", (FP32,), (Asked("fp32", "FAIL", "path/body-precision"),)),
    ServedModel("fp32-ieee", (FP32, "engine.env={TRITON_F32_DEFAULT: ieee}"), (Asked("fp32-ieee", "PASS"),)),
    ServedModel(
        "fp32-flex",
        (FP32, "engine.args=[--attention-backend, FLEX_ATTENTION]"),
        (Asked("fp32-flex", "PASS"),),
    ),
)


def audit(asked: Asked, where: tuple[str, ...], directory: Path) -> VerdictRecord:
    session = Session(
        config=load(None, (*BASE, *asked.changes, *where)),
        directory=directory,
        sync=asked.sync,
        resets_cache=asked.resets_cache,
    )
    return session.run(Silent()).record


def is_expected(asked: Asked, record: VerdictRecord) -> bool:
    principal = record.causes[0].cause if record.verdict is Outcome.FAIL else None
    if (record.verdict.value, principal) != (asked.verdict, asked.cause):
        return False
    probes = {probe.name: probe for probe in record.probes}
    return not asked.every_bit or all(every_bit_equal(probes[name]) for name in CONSISTENCY)


def every_bit_equal(probe: ProbeRecord) -> bool:
    """Of some tokens: a probe that compared none has not seen it."""
    return (
        probe.status is Outcome.PASS
        and not probe.vacuous
        and probe.evidence["tokens"] > 0
        and probe.evidence["differing"] == 0
    )


def told(record: VerdictRecord) -> dict[str, object]:
    return {
        "verdict": record.verdict.value,
        "causes": [
            f"{cause.cause}{' (gating)' * cause.gating}: {cause.evidence}; {cause.fix}"
            for cause in record.causes
        ],
        "probes": {probe.name: f"{probe.status.value}: {probe.message}" for probe in record.probes},
        "mean": record.metrics.get("mean"),
        "floor": record.floor.get("mean"),
        "engine": record.engine.numeric | record.engine.deployment,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="testbed:qwen3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="of the reference")
    parser.add_argument("--env", action="append", default=[])
    names = [served.name for served in EXPECTED]
    parser.add_argument(
        "--only", action="append", default=[], choices=names, help="this server; may be repeated"
    )
    given = parser.parse_args()
    model = models.materialise(given.model, given.out / "model") if ":" in given.model else Path(given.model)
    missed = 0
    for served in EXPECTED:
        if given.only and served.name not in given.only:
            continue
        config = load(None, (*BASE, *served.changes))
        env = dict(pair.split("=", 1) for pair in given.env) | config.engine.env
        arguments = [*flags(config.engine, config.model.dtype), *transfer_flags(given.python, env)]
        log, began = given.out / f"{served.name}.log", time.monotonic()
        try:
            with launch_vllm(given.python, model, arguments, env, log, timeout_s=240) as server:
                started = round(time.monotonic() - began)
                where = (
                    f"engine.url={server.url}",
                    f"model.path={model}",
                    f"model.dtype={config.model.dtype}",
                    f"validation.reference_device={given.device}",
                )
                for asked in served.asked:
                    began = time.monotonic()
                    record = audit(asked, where, given.out / asked.name)
                    right = is_expected(asked, record)
                    missed += not right
                    head = {"server": served.name, "audit": asked.name, "as expected": right}
                    times = {"start s": started, "audit s": round(time.monotonic() - began)}
                    print(json.dumps(head | times | told(record)), flush=True)  # noqa: T201 - the result
        except ZerodriftError as error:
            missed += 1
            print(json.dumps({"server": served.name, "error": str(error)[-3000:]}), flush=True)  # noqa: T201
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
