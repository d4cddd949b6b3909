"""Is it rounding? Its size alone does not say so: weights that are one small update old move every logprob as little.

What says so: a coarser dtype that the engine reports, a precision profile that allows for it, numbers on a coarse grid,
an engine that disagrees with itself by as much, or Δ that follows what rounding the weights does. Without any of these a
difference of rounding's size stays `unexplained`, and is told as what it may be. Torch-free.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from zerodrift.audit.probes.result import ProbeResult, with_fix
from zerodrift.config.precision import Precision
from zerodrift.core.cause import ANY_ENGINE, CAUSES, UNEXPLAINED
from zerodrift.records.evidence import AgreementEvidence
from zerodrift.records.verdict import CauseFound, FoundBy, Probe

COMPARABLE = 0.3
"""As decisions have it: two differences within this factor of each other may be one."""
FULL = ("float32", "float64", "fp32", "fp64", "f32", "f64", "auto", "null", "none", "")
"""What a setting of precision says where it rounds nothing, or says nothing."""
SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "head_dtype")
ROUNDED_BELOW_FP32 = {
    "vllm": "TRITON_F32_DEFAULT=ieee (--dtype float32 is in force already, and Triton's attention multiplies in TF32)",
    ANY_ENGINE: "float32 is in force already: turn off what rounds below it (TF32 products, attention kernels, the KV cache)",
}
"""Against rounding in an engine that reports float32."""


class Signs(NamedTuple):
    """What is known of an engine beside the size of Δ."""

    numeric: Mapping[str, str] = {}
    """As its fingerprint has it."""
    precision: Precision = Precision.FP32
    results: Sequence[ProbeResult] = ()
    mean: float = 0.0
    """Mean |Δ|."""
    to_know: str = "push the reference's own weights (--sync) and audit again"
    """What tells weights from rounding."""

    @property
    def in_float32(self) -> bool:
        """The engine says that it computes in fp32."""
        return _plain(self.numeric.get("dtype", "")) in ("float32", "fp32", "f32")

    @property
    def of_rounding(self) -> list[str]:
        """What shows rounding, in words; empty where nothing does."""
        found = [
            f"the engine reports {name} {value}"
            for name, value in self.numeric.items()
            if name in SETTINGS and _plain(value) not in (*FULL, "model", "all_f32", "all f32")
        ]
        if self.precision is not Precision.FP32:
            found.append(f"the precision profile is {self.precision.value}")
        return [*found, *_by_probes(self.results, self.mean)]


def settled(causes: Iterable[CauseFound], signs: Signs, engine: str) -> tuple[CauseFound, ...]:
    """The same causes; rounding by size alone is told as what it may be, and no fix is one that is in force."""
    return tuple(_settled(cause, signs, engine) for cause in causes)


def _settled(cause: CauseFound, signs: Signs, engine: str) -> CauseFound:
    if cause.cause == "path/body-precision" and signs.in_float32:
        cause = _without_the_dtype(cause, engine)
    if cause.found_by != FoundBy.SIZE or cause.follows_rounding:
        return cause
    if shown := signs.of_rounding:
        return msgspec.structs.replace(cause, evidence=f"{cause.evidence}; {shown[0]}")
    rounding = "" if signs.in_float32 else f"{CAUSES[cause.cause].fix(engine)}, or "
    reported = ", and the engine reports float32" if signs.in_float32 else ""
    doubt = f"{cause.evidence}; but nothing else shows rounding{reported}: it may be that, or weights that differ a little"
    unnamed = msgspec.structs.replace(
        cause, cause=UNEXPLAINED, evidence=doubt, explained=0.0, interval=(0.0, 0.0)
    )
    return with_fix(unnamed, f"to know which: {rounding}{signs.to_know}")


def _without_the_dtype(cause: CauseFound, engine: str) -> CauseFound:
    """llama.cpp keeps fp32 between operations, whatever it says: its fix is about files."""
    fixes = CAUSES[cause.cause].fixes
    if engine in fixes and "--dtype" not in fixes[engine]:
        return cause
    told = ROUNDED_BELOW_FP32.get(engine, ROUNDED_BELOW_FP32[ANY_ENGINE])
    return with_fix(cause, told)


def _by_probes(results: Iterable[ProbeResult], mean: float) -> list[str]:
    found = []
    for result in results:
        evidence = result.evidence
        if result.probe is Probe.HEAD_PRECISION and result.causes:
            found.append("its numbers lie on a coarse grid")
        if (
            result.probe in (Probe.PREFILL_DECODE, Probe.BATCH)
            and isinstance(evidence, AgreementEvidence)
            and evidence.differing
            and evidence.mean >= COMPARABLE * mean
        ):
            found.append(f"the engine disagrees with itself by as much ({result.probe}, {evidence.mean:.2g})")
    return found


def _plain(value: str) -> str:
    return value.strip().strip('"').lower().removeprefix("torch.")
