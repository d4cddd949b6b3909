"""A prefix cache that looks at a part of each block: only prompts that nearly agree can show it."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from zerodrift.audit.floor import measure_floor
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.audit.observe import BATCH
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.probes.parity import parity
from zerodrift.audit.prompts import assorted
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request, SamplingParams
from zerodrift.drift.gates import gates_for
from zerodrift.faults.rewriting import rewrite, with_prompt
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome

MODEL = "testbed:llama"
ANSWER = 4


class ForgetfulCache(FaultyBackend):
    """Takes a block for one that it has seen where the tokens `looked_at` agree, and all blocks before it."""

    def __init__(self, inner: Backend, block: int, looked_at: slice) -> None:
        super().__init__(inner)
        self.capabilities = inner.capabilities - {Capability.CACHED_TOKENS}
        self._block, self._looked_at = block, looked_at
        self._seen: dict[tuple[int, ...], tuple[int, ...]] = {}

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Of a prompt that the cache has put together, under the name of the one that was sent."""
        sent = [
            msgspec.structs.replace(
                request,
                prompt=msgspec.structs.replace(
                    request.prompt, token_ids=self._as_cached(request.prompt.token_ids)
                ),
            )
            for request in requests
        ]
        answers = self.inner.generate(sent)
        return rewrite(requests, answers, lambda request, each: with_prompt(each, request.prompt.token_ids))

    def _as_cached(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        key: tuple[int, ...] = ()
        taken: tuple[int, ...] = ()
        # The last token is always computed.
        for begin in range(0, len(ids) - self._block, self._block):
            block = ids[begin : begin + self._block]
            key += block[self._looked_at]
            taken += self._seen.setdefault(key, block)
        return taken + ids[len(taken) :]


@pytest.fixture(scope="module")
def engine():
    return ReferenceBackend(MODEL, dtype="float32")


@pytest.fixture
def compared(engine, reference):
    """The prompts and the plan of an audit without options, and the part of it that compares numbers."""
    judge = reference(MODEL)

    def run(block, looked_at):
        size = ValidationConfig()
        room = judge.max_model_len - ANSWER
        prompts = assorted(judge.tokenizer, judge.facts.vocab_size, room, ANSWER, size.num_prompts, size.seed)
        sampling = SamplingParams(max_tokens=ANSWER)
        requests = parity_requests(prompts, sampling, size.equivalence_trials, size.seed)
        cached = ForgetfulCache(engine, block, looked_at)
        answers = [
            answer
            for at in range(0, len(requests), BATCH)
            for answer in cached.generate(requests[at : at + BATCH])
        ]
        observed = [
            Observed(completion, request.sampling)
            for request, answer in zip(requests, answers, strict=True)
            for completion in answer.completions
        ]
        floor = measure_floor(judge.model, [item.passage for item in observed[:8]], "float32")
        table = tabulate(measure(judge.teacher, observed, judge.facts.eos_token_ids), floor)
        gates = gates_for(PROFILES[Precision.FP32].gate, floor)
        return parity(table, gates, np.random.default_rng(0)).status

    return run


@pytest.mark.parametrize(
    ("block", "looked_at"),
    [(16, slice(0, 12)), (128, slice(0, 64)), (128, slice(1, 128)), (16, slice(9, 16))],
    ids=["16-without-its-end", "128-first-half", "128-without-its-first", "16-without-its-beginning"],
)
def test_a_cache_that_ignores_a_part_of_a_block_is_seen(compared, block, looked_at):
    assert compared(block, looked_at) is Outcome.FAIL


def test_one_that_looks_at_all_of_it_is_not(compared):
    assert compared(16, slice(0, 16)) is Outcome.PASS
