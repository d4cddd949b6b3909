"""What the dump itself says, and leaves unsaid, as answers that stand in the verdict beside the numbers.

Lines that were skipped, rollouts that were not asked for, parameters that nobody stated and labels of several weights
all limit what the numbers can prove; a reader of the verdict must see them.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from zerodrift.audit.decide import open_to_doubt
from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.audit.recorded.copies import copies
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import NonFinite
from zerodrift.core.request import SHAPING
from zerodrift.records.dump import Dump
from zerodrift.records.evidence import DumpEvidence
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import CauseFound, Outcome, Probe

MOST_NAMED = 20
"""Bad lines that are named in the verdict; their number is always told."""
MOST_BAD = 0.1
"""Share of bad lines above which the others prove nothing: what was skipped may be the fault."""
MOST_PARAMETERS = 1
"""Parameters that are named beside the temperature; a line has no room for nine."""
_OPTIONS = {name: "--" + name.replace("_", "-") for name in ("temperature", "top_p", "top_k", "min_p")}


def dump_probe(
    dump: Dump,
    judged: Sequence[RecordedRollout],
    selection: str,
    engine: str,
    precision: str = "",
    *,
    labels_fit: bool = False,
) -> ProbeResult:
    """How much of the dump was judged, and which lines were not; `labels_fit`: each step was judged by
    weights of its own, or the one checkpoint has every number."""
    evidence = DumpEvidence(
        lines=dump.lines,
        judged=len(judged),
        bad_lines=len(dump.bad),
        empty=len(dump.empty),
        repeated=int(copies(judged).sum()),
    )
    message = f"{len(judged)} of {len(dump.rollouts)} rollouts judged"
    if selection:
        message += f" ({selection})"
    if precision:
        message += f"; gates are those of {precision}"
    if dump.empty:
        message += f"; {len(dump.empty)} sampled nothing"
    if evidence.repeated:
        message += (
            f"; repetitions among them: {evidence.repeated} (copies, or samples that share a seed), which count once in "
            "the test of the samples"
        )
    versions = sorted({rollout.version for rollout in judged if rollout.version is not None})
    if len(versions) > 1 and not labels_fit:
        message += f"; they carry {len(versions)} weight versions, and one checkpoint cannot be all of them (--version)"
    if not dump.bad:
        return answered(Probe.DUMP, Outcome.PASS, message, evidence)
    message += f"; {len(dump.bad)} of {dump.lines} lines skipped: {_named(dump)}"
    return answered(
        Probe.DUMP,
        Outcome.INCONCLUSIVE,
        message,
        evidence,
        required=len(dump.bad) > MOST_BAD * dump.lines,
        causes=tuple(_nonfinite(dump, engine)),
    )


def parameters_probe(judged: Sequence[RecordedRollout]) -> ProbeResult:
    """Which sampling parameters the dump does not state, and what they were taken for."""
    silent = unstated(judged)
    if not silent:
        return answered(
            Probe.PARAMETERS, Outcome.PASS, "the dump states every parameter that shapes a distribution"
        )
    return answered(Probe.PARAMETERS, Outcome.INCONCLUSIVE, _taken_as(silent))


def _taken_as(silent: Sequence[str]) -> str:
    """On one line, however many there are: what nobody states is off, and the temperature is 1."""
    others = [name for name in silent if name != "temperature"]
    named = others[:MOST_PARAMETERS] if len(others) > MOST_PARAMETERS + 1 else others
    rest = f" and {len(others) - len(named)} more" if len(named) < len(others) else ""
    told = [f"{', '.join(named)}{rest} (taken as off)"] if others else []
    told = ["temperature (taken as 1)", *told] if "temperature" in silent else told
    return f"not stated: {', '.join(told)}"


def unstated(judged: Sequence[RecordedRollout]) -> list[str]:
    """Parameters that some rollout leaves open."""
    return [name for name in SHAPING if any(name not in rollout.stated for rollout in judged)]


def how_to_state(names: Sequence[str]) -> str:
    """What to type, or to write down, for parameters that the dump does not state."""
    told = ", ".join(_OPTIONS[name] for name in names if name in _OPTIONS)
    return f"say so with {told}" if told else "write it into the dump"


def as_options(values: Mapping[str, float]) -> str:
    """Parameters as they are typed; those that have no option are left out."""
    return "".join(f" {_OPTIONS[name]} {value:.4g}" for name, value in values.items() if name in _OPTIONS)


def with_doubt(
    causes: Sequence[CauseFound], judged: Sequence[RecordedRollout], in_force: Collection[str] = ()
) -> tuple[CauseFound, ...]:
    """A parameter in force that nobody asked for, or one that the dump forgot to mention? Said where it is open."""
    silent = unstated(judged)
    doubted = []
    for cause in causes:
        names = open_to_doubt(cause, silent, in_force)
        doubt = f"; the dump does not state {', '.join(names)}: if this was requested, {how_to_state(names)}"
        evidence = cause.evidence + (doubt if names else "")
        doubted.append(msgspec.structs.replace(cause, evidence=evidence))
    return tuple(doubted)


def fingerprint_of(dump: Dump, judged: Sequence[RecordedRollout], engine: str) -> EngineFingerprint:
    """The engine as far as the dump knows it."""
    semantic = {}
    if kinds := sorted({rollout.kind.value for rollout in judged if rollout.kind is not None}):
        semantic["logprobs_mode"] = ",".join(f"{kind}_logprobs" for kind in kinds)
    if (model := next((rollout.model for rollout in judged if rollout.model), None)) is not None:
        semantic["model"] = model
    if versions := sorted({rollout.version for rollout in judged if rollout.version is not None}):
        semantic["weights_label"] = ", ".join(versions[:8]) + (", …" if len(versions) > 8 else "")
    deployment = {"recorded_as": dump.format.value, "recorded_in": judged[0].source}
    return EngineFingerprint(engine=engine, semantic=semantic, numeric={}, deployment=deployment)


def _named(dump: Dump) -> str:
    shown = "; ".join(f"{bad.where} ({bad.reason})" for bad in dump.bad[:MOST_NAMED])
    rest = len(dump.bad) - MOST_NAMED
    return shown + (f"; and {rest} more" if rest > 0 else "")


def _nonfinite(dump: Dump, engine: str) -> list[CauseFound]:
    corrupt = [bad for bad in dump.bad if bad.code == NonFinite.code]
    if not corrupt:
        return []
    evidence = f"{len(corrupt)} of {dump.lines} lines, first {corrupt[0].where}: {corrupt[0].reason}"
    share = len(corrupt) / dump.lines
    # Listed only: whoever skips bad lines asks about the others.
    return [
        found(
            "semantic/nonfinite",
            engine,
            Probe.DUMP,
            evidence,
            explained=share,
            interval=(share, share),
            gating=False,
        )
    ]
