"""Every account of an update that neither arrived nor stayed away, the cheapest first, up to one that explains all of it."""

from collections.abc import Callable, Iterator

import numpy as np

from zerodrift.audit.counterfactual.delivery import deliveries
from zerodrift.audit.update.arrival import arrivals
from zerodrift.audit.update.rotary import rebased
from zerodrift.audit.update.scale import scaled
from zerodrift.audit.update.seen import HALF, SETTLED, Seen, UpdateExplanation
from zerodrift.audit.update.weights import UpdatedWeights
from zerodrift.core.memory import ran_out

Tried = Callable[[UpdatedWeights, Seen, np.random.Generator], Iterator[UpdateExplanation]]


def accounts_of(
    weights: UpdatedWeights, seen: Seen, rng: np.random.Generator
) -> tuple[list[UpdateExplanation], bool]:
    """Those that explain more than half, and whether memory was enough to try all that there was to try."""
    found: list[UpdateExplanation] = []
    tries: tuple[Tried, ...] = (_scaled, _rebased, arrivals, _misdelivered)
    enough = True
    for tried in tries:
        try:
            weights.bring(weights.new)
            found += tried(weights, seen, rng)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            # A third copy of the weights, or the gradients of one more; that the update did not arrive is known without.
            enough = False
        if any(account.explained > SETTLED for account in found):
            break
    return found, enough


def ways(weights: UpdatedWeights) -> int:
    """How many discrete changes there are to try."""
    return sum(1 for _ in deliveries(weights.old, weights.new))


def _scaled(weights: UpdatedWeights, seen: Seen, rng: np.random.Generator) -> Iterator[UpdateExplanation]:
    if (account := scaled(weights, seen, rng)) is not None:
        yield account


def _rebased(weights: UpdatedWeights, seen: Seen, _: np.random.Generator) -> Iterator[UpdateExplanation]:
    return rebased(weights, seen)


def _misdelivered(weights: UpdatedWeights, seen: Seen, _: np.random.Generator) -> Iterator[UpdateExplanation]:
    """The engine answers like the new weights with one thing done wrong to them: up to the first that explains all.

    Each is tried on one sequence first, and on all if it explains half of that.
    """
    scout = seen.worst()
    for number, delivery in enumerate(deliveries(weights.old, weights.new), start=1):
        built = delivery.build()
        if scout.explained(weights.score(built, scout.completions)) <= HALF:
            continue
        explained = seen.explained(weights.score(built, seen.completions))
        if explained > HALF:
            message = (
                f"{delivery.message} ({explained:.1%} of the difference; {number} such changes were tried)"
            )
            yield UpdateExplanation(delivery.cause, message, explained)
        if explained > SETTLED:
            return
