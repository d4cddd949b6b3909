"""One case again: what the engine reports for each token, and what the reference makes of it."""

from typing import NamedTuple

import numpy as np

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.measure import Measurement, Observed, measure
from zerodrift.audit.reduce import Requests
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend


class Replayed(NamedTuple):
    """The answer to the first request."""

    measurement: Measurement | None
    """None where the engine's answer cannot be used at all."""
    first_bad: int | None
    """Index of the first wrong token; None where all are right."""
    problem: str = ""

    @property
    def tokens(self) -> list[tuple[int, float, float]]:
        """Each with what the engine reported and what the reference makes of it."""
        if self.measurement is None:
            return []
        ids = self.measurement.observed.completion.token_ids
        numbers = zip(self.measurement.reported.tolist(), self.measurement.contracted.tolist(), strict=True)
        return [(token, *pair) for token, pair in zip(ids, numbers, strict=True)]


class Replay(NamedTuple):
    """Both sides, and how far off is wrong."""

    engine: Backend
    reference: ReferenceBackend
    limit: float

    def __call__(self, requests: Requests) -> Replayed:
        """Send all of them together; judge the first."""
        answer = generated(self.engine, requests)[0]
        if answer.problems or not answer.completions:
            message = answer.problems[0].message if answer.problems else "no sample came back"
            return Replayed(None, 0, message)
        completion, request = answer.completions[0], requests[0]
        if completion.prompt_token_ids != request.prompt.token_ids:
            return Replayed(None, 0, "the engine shows another prompt than the one that was sent")
        if not completion.token_ids:
            return Replayed(None, None, "the engine answered with no token")
        (item,) = measure(
            self.reference.teacher,
            [Observed(completion, request.sampling)],
            self.reference.facts.eos_token_ids,
        )
        wrong = np.flatnonzero(~(np.abs(item.delta) <= self.limit))
        return Replayed(item, int(wrong[0]) if len(wrong) else None)

    def first_bad(self, requests: Requests) -> int | None:
        """As `audit.reduce` asks it."""
        return self(requests).first_bad
