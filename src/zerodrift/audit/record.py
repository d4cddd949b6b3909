"""What an audit or a blame decided, as the record of a verdict."""

from collections.abc import Sequence

import msgspec

from zerodrift.audit.decide import Decision
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.core.completion import EngineFingerprint
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.records.evidence import EndsEvidence, ParametersEvidence, Power, SamplingEvidence
from zerodrift.records.verdict import Probe, VerdictRecord

POWERFUL = (Probe.SAMPLING, Probe.ENDS, Probe.PARAMETERS)
"""Whose power stands in the verdict: later ones of the same draws (`Probe.SAMPLING_SINCE`) are about some of them."""


def verdict_record(
    decision: Decision,
    engine: EngineFingerprint,
    reference: ReferenceBackend,
    precision: Precision,
    floor: Floor | None,
    gates: Gates | None,
    **more: str,
) -> VerdictRecord:
    """A decision with what it rests on; metrics are those of the side that is wrong."""
    by_probe = {each.probe: each.evidence for each in decision.results}
    engine_side = by_probe.get(Probe.PARITY)
    numbers = by_probe.get(Probe.TRAINER, engine_side) if decision.guilty == "trainer" else engine_side
    metrics = {} if numbers is None else numbers.as_record()
    return VerdictRecord(
        verdict=decision.verdict,
        guilty=decision.guilty,
        message=decision.message,
        engine=named_alike(engine, reference),
        reference=reference.fingerprint(),
        model=str(reference.spec),
        precision=precision.value,
        floor={} if floor is None else floor.as_record(),
        metrics={name: float(value) for name, value in metrics.items()},
        gates={} if gates is None else gates._asdict(),
        causes=decision.causes,
        probes=tuple(each.record for each in decision.results),
        power=_power(decision.results),
        **more,
    )


def named_alike(engine: EngineFingerprint, reference: ReferenceBackend) -> EngineFingerprint:
    """The checkpoint's digest for weights that are the checkpoint's, whatever precision the engine holds them in.

    The exact engine widens a checkpoint of bf16 to fp32 and digests that: other bits, the same values.
    """
    digest, saved = engine.semantic.get("weights"), reference.version.digest
    if digest is None or saved is None or digest == saved:
        return engine
    dtype = engine.numeric.get("dtype", "")
    if not reference.has_weights(digest, dtype):
        return engine
    return msgspec.structs.replace(engine, semantic={**engine.semantic, "weights": saved})


def _power(results: Sequence[ProbeResult]) -> tuple[Power, ...]:
    """Of every probe that says what it would have seen; of a kind that two were after, the later one's."""
    lines: dict[str, Power] = {}
    for result in results:
        if (
            isinstance(result.evidence, SamplingEvidence | EndsEvidence | ParametersEvidence)
            and result.probe in POWERFUL
        ):
            lines |= {line.name: line for line in result.evidence.power}
    return tuple(lines.values())
