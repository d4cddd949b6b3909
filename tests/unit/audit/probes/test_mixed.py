"""Requests of one call with parameters of their own: engines that mix them up, beside one that does not."""

from collections.abc import Sequence

import msgspec
import pytest

from zerodrift.audit.plan import probe_requests
from zerodrift.audit.probes.mixed import MixedBatch
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, LogprobKind
from zerodrift.core.errors import EngineRefused
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome

NAMES = ("temperature", "top_p", "top_k", "logit_bias")


class Neighbours(FaultyBackend):
    """In company each request has some parameters of the one after it."""

    names: tuple[str, ...] = NAMES
    drawn_only = False

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if len(requests) < 2:
            return self.inner.generate(requests)
        changed = [
            msgspec.structs.replace(
                one,
                sampling=msgspec.structs.replace(
                    one.sampling, **{name: getattr(other.sampling, name) for name in self.names}
                ),
            )
            for one, other in zip(requests, [*requests[1:], requests[0]], strict=True)
        ]
        return self.inner.generate(changed)


class OnlyTemperature(FaultyBackend):
    """Takes no other parameter."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if any(each.sampling.truncates or each.sampling.logit_bias for each in requests):
            raise EngineRefused("one parameter, please")
        return self.inner.generate(requests)


@pytest.fixture
def asked(llama):
    requests = probe_requests(llama.facts.vocab_size, 200, llama.tokenizer.all_special_ids, 3, 6, 60)
    return lambda engine: MixedBatch(engine, llama, requests, 2.5e-5).ask()


def test_an_engine_that_keeps_them_apart_passes(asked, llama):
    assert asked(llama).status is Outcome.PASS
    assert asked(OnlyTemperature(llama)).status is Outcome.PASS


def test_a_token_that_rounding_left_in_is_no_neighbours(llama):
    """In bf16 one of a top-p was drawn that the reference leaves out, and 28 nats were won for each of the others by it."""
    engine = ReferenceBackend("testbed:llama", dtype="bfloat16")
    requests = probe_requests(llama.facts.vocab_size, 300, llama.tokenizer.all_special_ids, 1008, 6, 120)
    assert MixedBatch(engine, llama, requests, 0.03).ask().status is Outcome.PASS


@pytest.mark.parametrize("names", [NAMES, *((name,) for name in NAMES)])
def test_parameters_of_a_neighbour_are_seen(asked, llama, names):
    engine = Neighbours(llama)
    engine.names = names
    result = asked(engine)
    assert result.status is Outcome.FAIL, result.message
    (cause,) = result.causes
    assert cause.cause == "path/batch-variance"
    assert cause.gating
    assert "alone they are right" in cause.evidence


def test_an_engine_that_reports_its_own_numbers_is_judged_by_its_draws(asked, llama):
    llama.kind = LogprobKind.RAW
    try:
        assert asked(llama).status is Outcome.PASS
        assert asked(Neighbours(llama)).status is Outcome.FAIL
    finally:
        llama.kind = LogprobKind.PROCESSED
