"""Does a weight update arrive, whole, and does nothing older survive it?

A known perturbation B of the checkpoint A is pushed the way the trainer pushes weights, and the engine is asked
again. What is told apart on the same tokens:

    delivered            the engine is at B: slope 1 of the observed on the predicted change
    stale                the engine is still at A: slope 0
    something else       parts or rows that did not arrive, a fraction, a multiple … (`audit/update/explanations.py`)
    stale prefix cache   fresh prompts are at B, cached ones are B looking back on A's keys and values

Afterwards A is pushed back and must answer as before (A→B→A). Requests must sample at temperature 1 without
truncation, where raw and processed logprobs are the same number.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.counterfactual.delivery import not_asked
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, vacuous
from zerodrift.audit.update.explanations import accounts_of, ways
from zerodrift.audit.update.seen import MOST, NEARLY, Seen
from zerodrift.audit.update.weights import UpdatedWeights
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.teacher import Teacher, entries
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.core.completion import Completion
from zerodrift.core.errors import BadAnswer, EngineError, ZerodriftError
from zerodrift.core.memory import ran_out
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import WeightVersion
from zerodrift.drift.gates import Gates
from zerodrift.models.family.abilities import has_kv_cache
from zerodrift.records.evidence import SyncEvidence
from zerodrift.records.verdict import CauseFound, Outcome, Probe
from zerodrift.stats.arrays import Floats

NAME = Probe.WEIGHT_SYNC
NEW = "audit-b"
"""Label of the pushed weights."""
STATE_REQUESTS = 2
"""Asked of a server whose update failed."""
LEAST_SIGNAL = 5.0
"""Gates by which an update must move logprobs for what did not arrive to be told from rounding."""


class Update(NamedTuple):
    """How the trainer updates this engine."""

    before: Path
    after: Path
    resets_cache: bool


def weight_sync(
    engine: Backend, weights: UpdatedWeights, update: Update, requests: Sequence[Request], gates: Gates
) -> ProbeResult:
    """Push B, look, push A back, look again."""
    needed = {Capability.LOAD_WEIGHTS, Capability.SEED}
    if missing := needed - engine.capabilities:
        return not_judged(NAME, f"the engine does not offer: {', '.join(sorted(missing))}")
    _generate(engine, requests)
    pushed = _Pushed(engine, weights, update, requests, gates)
    try:
        cached, fresh = pushed.seen()
    except ZerodriftError as error:
        raise pushed.failed("the update failed midway", error, puts_back=True) from error
    except BaseException:
        pushed.put_back()
        raise
    try:
        pushed.put_back()
    except ZerodriftError as error:
        raise pushed.failed("putting the old weights back failed", error, puts_back=False) from error
    back = _generate(engine, _salted(engine, requests, "audit-a"))
    at_new, at_old = weights.at_both(back)
    returned = Seen(back, _reported(back), at_new=at_old, at_old=at_new)
    return _judge(engine, weights, cached, fresh, returned, gates)


class _Pushed(NamedTuple):
    """An engine that is being updated, and what is known of it when that fails."""

    engine: Backend
    weights: UpdatedWeights
    update: Update
    requests: Sequence[Request]
    gates: Gates

    def seen(self) -> tuple[Seen, Seen]:
        """What is answered after the update: from the cache where there is one, and fresh."""
        engine, weights = self.engine, self.weights
        engine.load_weights(self.update.after, WeightVersion(NEW))
        if self.update.resets_cache:
            engine.reset_cache()
        cached = _see(weights, _generate(engine, self.requests))
        # Where no salt keeps a request out of the cache, asking once more would ask the same.
        if Capability.CACHE_SALT not in engine.capabilities:
            return cached, cached
        return cached, _see(weights, _generate(engine, _salted(engine, self.requests, NEW)))

    def put_back(self) -> None:
        self.engine.load_weights(self.update.before, WeightVersion("audit-a"))
        if Capability.RESET_CACHE in self.engine.capabilities:
            self.engine.reset_cache()

    def failed(self, what: str, error: ZerodriftError, *, puts_back: bool) -> ZerodriftError:
        """What the server holds now, and the first error: one that follows from it must not hide it."""
        second = ""
        try:
            if puts_back:
                self.put_back()
        except ZerodriftError as follows:
            second = f"; putting the old weights back failed too ({follows})"
        told = type(error)(f"{what}, and {self.state()}: {error}{second}")
        if isinstance(error, EngineError) and isinstance(told, EngineError):
            told.status = error.status
        return told

    def state(self) -> str:
        """Which weights answer now, by asking."""
        try:
            answers = _generate(
                self.engine, _salted(self.engine, self.requests[:STATE_REQUESTS], "audit-state")
            )
        except ZerodriftError:
            return "the server answers no request any more: it is left torn, restart it"
        seen = _see(self.weights, answers)
        if float(np.abs(seen.at_old - seen.reported).mean()) <= self.gates.mean:
            return "the server answers with the old weights"
        if seen.gap <= self.gates.mean:
            return "the server answers with the new weights"
        return "the server answers with neither the old nor the new weights: it is left torn, restart it"


def _judge(
    engine: Backend, weights: UpdatedWeights, cached: Seen, fresh: Seen, returned: Seen, gates: Gates
) -> ProbeResult:
    """`returned` is seen from A: its new weights are the ones that were pushed back."""
    hits = sum(completion.cached_tokens or 0 for completion in cached.completions)
    signal = float(np.abs(fresh.at_new - fresh.at_old).mean())
    evidence = SyncEvidence(
        slope=fresh.slope,
        gap_fresh=fresh.gap,
        gap_cached=cached.gap,
        gap_returned=returned.gap,
        predicted_change=signal,
        cached_tokens=hits,
    )
    if signal < LEAST_SIGNAL * gates.mean:
        return vacuous(NAME, f"the update moves logprobs by {signal:.2g}, too little to see", evidence)
    causes = _causes(engine, weights, cached, fresh, gates)
    if causes:
        return answered(NAME, Outcome.FAIL, causes[0].evidence, evidence, causes=tuple(causes))
    if returned.gap > gates.mean:
        cause = _not_returned(engine, returned, gates)
        return answered(NAME, Outcome.FAIL, cause.evidence, evidence, causes=(cause,))
    message = f"the update arrived whole (slope {fresh.slope:.4f}) and left nothing behind"
    if Capability.CACHED_TOKENS in engine.capabilities and not hits:
        message += "; the cache held nothing to go stale"
    return answered(NAME, Outcome.PASS, message, evidence)


def _not_returned(engine: Backend, returned: Seen, gates: Gates) -> CauseFound:
    """B arrived whole and A did not come back: the second push was lost, or something beside the weights stayed."""
    message = f"after A→B→A the engine is {returned.gap:.2g} away from A"
    at_b = float(np.abs(returned.at_old - returned.reported).mean())
    if at_b <= max(gates.mean, returned.gap / 20):
        message = f"{message}, and answers with B: the second update did not arrive"
        return found("weights/stale", engine.name, NAME, message, explained=1 - at_b / returned.gap)
    # A table beside the weights, or a second push of which a part was lost: both look like this.
    message = (
        f"{message}, and at neither of the two: the update may be lost in part, or something beside it stayed"
    )
    return found(UNEXPLAINED, engine.name, NAME, message, explained=0.0, interval=(0.0, 0.0))


def _causes(
    engine: Backend, weights: UpdatedWeights, cached: Seen, fresh: Seen, gates: Gates
) -> list[CauseFound]:
    if cached is fresh and fresh.gap > gates.mean and any(each.cached_tokens for each in cached.completions):
        # No salt kept them apart: what is wrong may be what was cached.
        cause = _stale_prefix(engine, weights, cached, gates)
        if cause.cause != UNEXPLAINED:
            return [cause]
    if fresh.gap > gates.mean:
        return [_undelivered(engine, weights, fresh, gates)]
    if cached.gap > gates.mean:
        return [_stale_prefix(engine, weights, cached, gates)]
    return []


def _undelivered(engine: Backend, weights: UpdatedWeights, fresh: Seen, gates: Gates) -> CauseFound:
    """The account of the update under which the engine's numbers are what they should be."""
    for account in (_stale_replica, _stale):
        if (cause := account(engine, weights, fresh, gates)) is not None:
            return cause
    accounts, enough = accounts_of(weights, fresh, np.random.default_rng(0))
    best = max(accounts, key=lambda account: account.explained, default=None)
    if best is not None and _is_enough(best.explained, fresh, gates):
        cause = found(best.cause, engine.name, NAME, best.message, explained=best.explained)
        return msgspec.structs.replace(cause, located=best.located)
    message = f"after the update the engine is at neither version: slope {fresh.slope:.3f}, nothing known explains it"
    message += f" ({ways(weights)} ways to exchange, round or rebuild parts were tried)" if enough else ""
    if not enough:
        message += "; not all that is known was tried, for want of memory for a third copy of the weights"
    if missing := not_asked(weights.new):
        message += f"; not tried, for want of such parts in this model: {', '.join(missing)}"
    unnamed = found(UNEXPLAINED, engine.name, NAME, message, explained=0.0, interval=(0.0, 0.0))
    # The probe says the same of itself.
    return msgspec.structs.replace(unnamed, retells_probe=True)


def _stale(engine: Backend, weights: UpdatedWeights, fresh: Seen, gates: Gates) -> CauseFound | None:
    left = float(np.abs(fresh.at_old - fresh.reported).mean())
    if left > max(gates.mean, fresh.gap / 20):
        return None
    message = f"the engine answers with the weights from before the update: slope {fresh.slope:.3f}"
    labels = {span.version.label for completion in fresh.completions for span in completion.versions}
    if Capability.WEIGHT_VERSION in engine.capabilities and labels == {NEW}:
        message += f", under the label {NEW!r} of the update"
        return found("weights/version-label", engine.name, NAME, message, explained=1 - left / fresh.gap)
    return found("weights/stale", engine.name, NAME, message, explained=1 - left / fresh.gap)


def _stale_replica(engine: Backend, weights: UpdatedWeights, fresh: Seen, gates: Gates) -> CauseFound | None:
    """Some requests are entirely at the new weights and others entirely at the old ones."""
    lengths = [len(completion.token_ids) for completion in fresh.completions]
    edges = np.cumsum([0, *lengths])
    old = [float(np.abs(fresh.at_old[a:b] - fresh.reported[a:b]).mean()) for a, b in pairwise(edges)]
    new = [float(np.abs(fresh.at_new[a:b] - fresh.reported[a:b]).mean()) for a, b in pairwise(edges)]
    at_old = [number for number, size in enumerate(old) if size <= gates.mean]
    at_new = [number for number, size in enumerate(new) if size <= gates.mean]
    if not at_old or not at_new or len(at_old) + len(at_new) < len(old):
        return None
    message = f"{len(at_old)} of {len(old)} requests were answered with the old weights, the others with the new ones"
    return found("weights/replica", engine.name, NAME, message)


def _is_enough(explained: float, seen: Seen, gates: Gates) -> bool:
    """Whether an account that removes this share of the difference is to be believed."""
    return explained > MOST or (explained > NEARLY and (1 - explained) * seen.gap <= gates.mean)


def _stale_prefix(engine: Backend, weights: UpdatedWeights, cached: Seen, gates: Gates) -> CauseFound:
    """What the new weights make of the old ones' keys and values, for as many tokens as the engine reused."""
    if not has_kv_cache(weights.new):
        message = "prompts that were cached differ, and the model keeps nothing that could be replayed: not asked why"
        return found(UNEXPLAINED, engine.name, NAME, message, explained=0.0)
    try:
        weights.bring_both()
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        message = "prompts that were cached differ, and there is no room for both versions to replay it: not asked why"
        return found(UNEXPLAINED, engine.name, NAME, message, explained=0.0)
    before, after = 0.0, 0.0
    teacher = Teacher(weights.new)
    begin = 0
    for completion in cached.completions:
        end = begin + len(completion.token_ids)
        reported = cached.reported[begin:end]
        before += float(np.abs(cached.at_new[begin:end] - reported).sum())
        predicted = _replay(teacher, weights.old, completion)
        after += float(np.abs(predicted - reported).sum())
        begin = end
    explained = 1 - after / before
    hits = sum(completion.cached_tokens or 0 for completion in cached.completions)
    kept_apart = Capability.CACHE_SALT in engine.capabilities
    whose = "fresh prompts" if kept_apart else "prompts that nothing keeps out of the cache"
    message = (
        f"{whose} answer with the new weights, {hits} cached prompt tokens with the old ones' keys and "
        f"values: replaying that explains {explained:.1%} of the difference"
    )
    cause = "weights/stale-prefix-cache" if _is_enough(explained, cached, gates) else UNEXPLAINED
    return found(cause, engine.name, NAME, message, explained=explained)


def _replay(teacher: Teacher, earlier: Any, completion: Completion) -> Floats:
    start = len(completion.prompt_token_ids)
    logits_TV = teacher.continued(completion.sequence, start, earlier, completion.cached_tokens or 0)
    replayed: Floats = entries(logits_TV, completion.token_ids).double().numpy()
    return replayed


def _see(weights: UpdatedWeights, completions: list[Completion]) -> Seen:
    at_new, at_old = weights.at_both(completions)
    return Seen(completions, _reported(completions), at_new, at_old)


def _reported(completions: Sequence[Completion]) -> Floats:
    return np.concatenate([np.array(completion.logprobs) for completion in completions])


def _generate(engine: Backend, requests: Sequence[Request]) -> list[Completion]:
    answers = generated(engine, requests)
    for answer in answers:
        if not answer.completions:
            problem = answer.problems[0].message if answer.problems else "no sample at all"
            raise BadAnswer(f"the engine's answer cannot be used: {problem}")
        if not answer.completions[0].token_ids:
            raise BadAnswer("the engine answered without a token, and there is nothing to compare")
    return [answer.completions[0] for answer in answers]


def _salted(engine: Backend, requests: Sequence[Request], salt: str) -> list[Request]:
    """Kept out of what was cached before, where the engine knows salts: one that does not refuses them."""
    if Capability.CACHE_SALT not in engine.capabilities:
        return list(requests)
    return [
        Request(Prompt(each.prompt.token_ids, each.prompt.text, salt), each.sampling) for each in requests
    ]
