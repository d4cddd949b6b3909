"""Causes that explain Δ or the samples, as far as numbers alone can tell; `audit/decide.py` weighs them against probes."""

import msgspec

from zerodrift.audit.attribute import Attribution, SelectedCause
from zerodrift.audit.probes.result import ProbeResult, found, with_fix
from zerodrift.audit.response.answer import Localisation
from zerodrift.core.cause import CAUSES, UNEXPLAINED
from zerodrift.drift.sampling import draws_depend
from zerodrift.records.evidence import SamplingEvidence
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe
from zerodrift.stats.intervals import FEWEST_SEQUENCES

LEAST_EXPLAINED = 0.5
"""Below this the difference has no name: `unexplained` is the truth."""


def attributed(attribution: Attribution, engine: str, shape: str) -> tuple[CauseFound, ...]:
    """What was selected as causes; `unexplained` where that leaves most of the difference standing."""
    answer, selected = attribution.response, attribution.selected
    if answer is not None and answer.located:
        return (_located(answer, engine),)
    if answer is not None and answer.follows:
        # Rounding follows no part of the model: what was named by its size is something else.
        selected = tuple(each for each in selected if not each.by_size)
    causes = tuple(_as_cause(each, engine, answer) for each in selected)
    to_floor = attribution.explained_to_floor and len(selected) == len(attribution.selected)
    explained = to_floor or any(
        CAUSES[each.cause].approximate and each.explained >= LEAST_EXPLAINED for each in selected
    )
    if explained:
        return causes
    left = f"no explanation brings Δ to the floor (median {attribution.residual_sigmas:.1f} σ left): {shape}"
    if answer is not None:
        left = f"{answer.message}; {shape}" if answer.follows else f"{left}; {answer.message}"
    if attribution.tried_outright:
        left += (
            f"; none of {attribution.tried_outright} exchanged, missing, doubled or scaled parts explains it"
        )
    unnamed = found(UNEXPLAINED, engine, FoundBy.VALUE, left, explained=0.0, interval=(0.0, 0.0))
    # What explains a part is a hint, not a name.
    return (unnamed, *(msgspec.structs.replace(cause, gating=False) for cause in causes))


def _located(answer: Localisation, engine: str) -> CauseFound:
    """A place in the model has no name in the vocabulary, and is worth more than one."""
    share = max(0.0, min(1.0, answer.share))
    cause = found(UNEXPLAINED, engine, FoundBy.VALUE, answer.message, explained=share)
    where = " and ".join(knob.place for knob in answer.located)
    fix = f"look at how the engine computes {where}, and which weights it has there"
    return msgspec.structs.replace(with_fix(cause, fix), located=answer.located)


def by_samples_alone(samples: ProbeResult, engine: str) -> tuple[CauseFound, ...]:
    """Numbers are right, samples are not, and no explanation of the sampler says how."""
    if samples.status is not Outcome.FAIL:
        return ()
    evidence = samples.evidence
    depend = isinstance(evidence, SamplingEvidence) and draws_depend(evidence)
    cause = "semantic/seed" if depend else "semantic/sampling-bias"
    return (found(cause, engine, Probe.SAMPLING, samples.message),)


def _as_cause(selected: SelectedCause, engine: str, answer: Localisation | None) -> CauseFound:
    evidence = f"{selected.message}: {selected.gain_nats:.0f} nats of evidence"
    follows_rounding = selected.by_size and answer is not None and bool(answer.rounding)
    if follows_rounding and answer is not None:
        evidence += f", and follows what rounding the weights does (rank correlation {answer.rounding:.2f})"
    if not selected.by_size:
        evidence += f" from what was {selected.channel}"
    cause = found(
        selected.cause,
        engine,
        FoundBy.SIZE if selected.by_size else FoundBy.VALUE,
        evidence + _doubt(selected.sequences),
        explained=selected.explained,
        interval=selected.interval,
        gating=True,
    )
    return msgspec.structs.replace(cause, follows_rounding=follows_rounding)


def _doubt(sequences: int) -> str:
    """Why the share has no interval, where it has none."""
    if sequences >= FEWEST_SEQUENCES:
        return ""
    if not sequences:
        return "; no sequence chosen by chance shows it, and the share is that of the worst"
    return f"; the share is of {sequences} sequences, too few for an interval"
