"""The reference on weights that were really trained: what it says must make sense to a person."""

from pathlib import Path

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Teacher
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.smollm2 import COMPLETE

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> ReferenceBackend:
    directory: Path = request.config.rootpath / ".cache" / "smollm2"
    if not (directory / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return ReferenceBackend(directory)


def test_it_knows_the_capital_of_france(reference: ReferenceBackend) -> None:
    prompt = Prompt(reference.tokenize("The capital of France is"))
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=8))
    (completion,) = reference.generate([request])[0].completions
    assert "Paris" in (completion.text or "")


def test_its_logprobs_are_those_of_scoring_to_the_rounding_of_fp32(reference: ReferenceBackend) -> None:
    texts = ("The capital of France is", "2, 4, 6, 8,", "def add(a, b):\n    return")
    requests = [
        Request(Prompt(reference.tokenize(text)), SamplingParams(seed=number, max_tokens=6))
        for number, text in enumerate(texts)
    ]
    completions = [answer.completions[0] for answer in reference.generate(requests)]
    scores = Teacher(reference.model).score([completion.sequence for completion in completions])
    for completion, values in zip(completions, scores, strict=True):
        expected = values[len(completion.prompt_token_ids) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
