"""Whole audits of engines whose every number is right in the audit's own requests: what is asked by itself finds them out."""

import zlib
from collections.abc import Sequence

import msgspec
import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome

SMALL = ValidationConfig(num_prompts=16, equivalence_trials=24, max_tokens=16)


class SeedOfThePrompt(FaultyBackend):
    """Requests without a seed get one that is made of their prompt."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return self.inner.generate([self._seeded(each) for each in requests])

    def _seeded(self, request: Request) -> Request:
        if request.sampling.seed is not None:
            return request
        seed = zlib.crc32(bytes(str(request.prompt.token_ids), "ascii"))
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


class TemperatureOfTheNext(FaultyBackend):
    """In company each request is sampled and reported at the temperature of the one after it."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        temperatures = [each.sampling.temperature for each in requests]
        changed = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, temperature=other))
            for each, other in zip(requests, [*temperatures[1:], temperatures[0]], strict=True)
        ]
        return self.inner.generate(changed)


FAULTS = {
    "seed of the prompt": (SeedOfThePrompt, "semantic/seed"),
    "temperature of the next": (TemperatureOfTheNext, "path/batch-variance"),
    "nothing": (FaultyBackend, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_shows_in_no_request_of_the_audit_is_named(matrix, reference, tmp_path, name):
    plant, cause = FAULTS[name]
    engine = plant(ReferenceBackend("testbed:llama", dtype="float32"))
    record = matrix.judge(engine, reference("testbed:llama"), tmp_path, SMALL)
    assert record.verdict is (Outcome.PASS if cause is None else Outcome.FAIL)
    assert [each.cause for each in record.causes if each.gating] == ([] if cause is None else [cause])
