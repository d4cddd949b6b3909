"""A difference that nothing predicts: is it there when a request is asked alone?

The batch probe asks six short requests at temperature 1. A fault that needs more company than that, or the run's own
sampling, passes it by. So the requests that are wrong are asked alone and, with the others of their call, in company, each
twice: what is right alone both times and wrong in company both times is wrong because of the company.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from zerodrift.audit.measure import Measurement
from zerodrift.audit.observe import BATCH
from zerodrift.core.request import Prompt, Request
from zerodrift.drift.gates import Gates

MOST_ASKED = 6
LEAST_WRONG = 2
"""Requests that must be wrong again in company. Of what comes and goes by itself, whatever its rate, less than one in a
hundred spares six requests twice alone and hits two of them twice together."""
FAR = 3
"""Gates of the mean from which on a request is wrong, as for answers that changed."""
TWICE = 2
Ask = Callable[[list[Request]], list[Sequence[Measurement]]]
"""Requests that are in flight together, to what was made of each of their samples."""


def only_in_company(
    ask: Ask, plan: Sequence[Request], sizes: Sequence[tuple[int, float]], gates: Gates, salt: str | None
) -> str | None:
    """The evidence in words; None where company is not what makes the difference. `sizes`: of each sample its request's
    number and mean |Δ|; `salt`: for prompts that must not be found in a cache."""
    asked = _wrong_together(sizes, gates)
    if len(asked) < LEAST_WRONG:
        return None
    begin = asked[0] - asked[0] % BATCH
    together = list(plan[begin : begin + BATCH])
    if len(together) <= LEAST_WRONG:
        return None
    counts = []
    for time in range(TWICE):
        purpose = None if salt is None else f"{salt}-{time}"
        alone = [ask([_alone(plan[number], purpose)])[0] for number in asked]
        if not all(each and _right(each, gates) for each in alone):
            return None
        answers = ask([_salted(request, purpose) for request in together])
        wrong = sum(_size(answers[number - begin]) > FAR * gates.mean for number in asked)
        if wrong < LEAST_WRONG:
            return None
        counts.append(wrong)
    return (
        f"of {len(asked)} requests that are wrong all are right when they are asked alone, twice over, and "
        f"{' and '.join(map(str, counts))} wrong again in company of {len(together) - 1} others"
    )


def _wrong_together(sizes: Sequence[tuple[int, float]], gates: Gates) -> list[int]:
    """The worst of the call that has most wrong requests."""
    wrong: dict[int, float] = {}
    for number, size in sizes:
        if size > FAR * gates.mean:
            wrong[number] = max(size, wrong.get(number, 0.0))
    calls = [number // BATCH for number in wrong]
    most = max(set(calls), key=lambda call: (calls.count(call), -call), default=None)
    own = [number for number in wrong if number // BATCH == most]
    return sorted(own, key=lambda number: -wrong[number])[:MOST_ASKED]


def _alone(request: Request, salt: str | None) -> Request:
    """One sample: two are company to each other."""
    request = _salted(request, None if salt is None else f"{salt}-alone")
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, n=1))


def _salted(request: Request, salt: str | None) -> Request:
    prompt = request.prompt
    return request if salt is None else Request(Prompt(prompt.token_ids, prompt.text, salt), request.sampling)


def _size(measurements: Sequence[Measurement]) -> float:
    return max((float(np.abs(each.delta).mean()) for each in measurements), default=0.0)


def _right(measurements: Sequence[Measurement], gates: Gates) -> bool:
    worst = max(float(np.abs(each.delta).max()) for each in measurements)
    return _size(measurements) <= gates.mean and worst <= gates.unlike_rounding
