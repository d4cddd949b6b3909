"""zerodrift's engine as a contender: exact, and with the ops that nothing constrains."""

from collections.abc import Sequence
from typing import Any

from zerodrift.bench.contender import SEARCH_DIVISOR, Run, Served, Stopwatch, Time, fastest
from zerodrift.bench.workload import Job, shortened
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.exact.preparation import prepare, restore

EXACT, UNCONSTRAINED = "exact", "unconstrained"
UNCONSTRAINED_OPS = {
    "F.linear, SDPA, torch's activation": frozenset({"linear", "attention", "activation"}),
    "prepacked linears, SDPA, torch's activation": frozenset({"attention", "activation"}),
}
"""What an engine may use that promises nothing. Which is faster depends on the machine, so both are tried."""


class EngineContender:
    """An engine, its prefix cache off: from the second round on it would hold every prompt."""

    def __init__(self, name: str, setting: str, model: Any) -> None:
        """`model` is copied by the engine."""
        self.name, self.setting = name, setting
        # Plain ops make no promise that a check could hold.
        interval = None if name == EXACT else 0
        self._engine = Engine(model, enable_prefix_caching=False, logprob_check_interval=interval)

    def run(self, jobs: Sequence[Job]) -> Run:
        """Sampled at temperature 1, each request with a seed of its own."""
        params = [
            SamplingParams(max_tokens=job.num_tokens, ignore_eos=True, seed=number)
            for number, job in enumerate(jobs)
        ]
        watch = Stopwatch()
        outputs = self._engine.generate([list(job.prompt) for job in jobs], params)
        taken = watch.read()
        return Run(taken, [Served(output.token_ids, output.logprobs) for output in outputs])

    def close(self) -> None:
        """Nothing outlives the object."""


def exact(model: Any) -> EngineContender:
    """The engine as users get it."""
    return EngineContender(EXACT, "as it comes", model)


def unconstrained(model: Any, jobs: Sequence[Job]) -> EngineContender:
    """The same scheduler, KV and sampler over plain ops: what exactness costs. `model` comes back as it was."""
    short = shortened(jobs, SEARCH_DIVISOR)
    tried: list[tuple[EngineContender, Time]] = []
    for setting, plain in UNCONSTRAINED_OPS.items():
        contender = EngineContender(UNCONSTRAINED, setting, prepare(model, plain=plain))
        restore(model)
        contender.run(short[:2])
        tried.append((contender, contender.run(short).time))
    return fastest(tried)
