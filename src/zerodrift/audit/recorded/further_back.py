"""Weights of which earlier step? Where each step has a checkpoint, an engine that is several updates late is found by it."""

import numpy as np

from zerodrift.audit.measure import measure
from zerodrift.audit.probes.result import found
from zerodrift.audit.recorded.notation_readings import size
from zerodrift.audit.recorded.scored import ScoredDump, load_step
from zerodrift.audit.recorded.shared_prompts import scoring_teacher
from zerodrift.audit.recorded.weights import Suspected, compare_weights
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.drift.gates import Gates
from zerodrift.records.verdict import CauseFound, Probe

MOST = 8
"""Steps behind the one before; each costs a load and a pass over the rollouts of one step."""


def further_back(
    scored: ScoredDump, reference: ReferenceBackend, gates: Gates, engine: str
) -> CauseFound | None:
    """The numbers of the worst step, by the weights of steps before the last one; None where none of them has these."""
    checkpoints, step = scored.checkpoints, scored.step
    if checkpoints is None or step is None:
        return None
    own = np.flatnonzero(scored.of_reference).tolist()
    observed = [scored.measurements[at].observed for at in own]
    earlier = sorted((each for each in checkpoints if each < step), reverse=True)[1 : 1 + MOST]
    cause = None
    for other in earlier:
        load_step(reference, checkpoints, other)
        teacher = scoring_teacher(reference.model, reference.batch)
        before = np.array(
            [size(item.delta) for item in measure(teacher, observed, reference.facts.eos_token_ids)]
        )
        suspected = Suspected([scored.rollouts[at] for at in own], scored.sizes[own], before)
        answer = compare_weights(suspected, gates, engine)
        if answer.result.causes:
            cause = found(
                "weights/stale",
                engine,
                Probe.PREVIOUS_WEIGHTS,
                f"of step {step}, {answer.at_old.sum()} of {len(own)} rollouts have the numbers of the weights of step {other}: "
                f"mean |Δ| {before[answer.at_old].mean():.2g} from those and {scored.sizes[own][answer.at_old].mean():.2g} from "
                f"the weights of step {step}",
                explained=answer.result.causes[0].explained,
            )
            break
    load_step(reference, checkpoints, step)
    return cause
