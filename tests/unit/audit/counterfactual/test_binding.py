import msgspec
import numpy as np
import pytest

from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.measure import Observed, measure
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams

REQUESTED = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.3, max_tokens=6)


@pytest.fixture(scope="module")
def completions(llama):
    rng = np.random.default_rng(0)
    requests = [
        Request(
            Prompt((0, *rng.integers(4, 500, 5 + row).tolist())), msgspec.structs.replace(REQUESTED, seed=row)
        )
        for row in range(6)
    ]
    return [answer.completions[0] for answer in llama.generate(requests)]


@pytest.fixture
def look(llama, gates):
    def run(completions):
        observed = [Observed(completion, REQUESTED) for completion in completions]
        measurements = list(measure(llama.teacher, observed, llama.facts.eos_token_ids))
        return find_misbound(llama.teacher, measurements, gates)

    return run


def bound(completion: Completion, to: Completion) -> Completion:
    """The output of one request under the prompt of another."""
    return msgspec.structs.replace(completion, prompt_token_ids=to.prompt_token_ids, lineage=())


def test_outputs_at_home(look, completions):
    assert look(completions) is None


def test_two_outputs_exchanged(look, completions):
    swapped = [bound(completions[1], completions[0]), bound(completions[0], completions[1]), *completions[2:]]
    says = look(swapped)
    assert says is not None
    assert any(pair in says for pair in ("request 0 has", "request 1 has"))
    assert any(pair in says for pair in ("of request 1;", "of request 0;"))
    assert "2 of 6 outputs are not at home" in says


def test_all_outputs_rotated(look, completions):
    rotated = [bound(completions[number - 1], completions[number]) for number in range(6)]
    says = look(rotated)
    assert says is not None
    assert "6 of 6 outputs are not at home" in says


def test_outputs_that_no_prompt_explains(look, completions):
    rng = np.random.default_rng(1)
    wrong = [
        msgspec.structs.replace(
            each, logprobs=tuple((np.array(each.logprobs) - rng.uniform(0.1, 1, len(each.logprobs))).tolist())
        )
        for each in completions
    ]
    assert look(wrong) is None


def test_a_single_prompt_has_no_other_home(look, completions):
    off = msgspec.structs.replace(completions[0], logprobs=tuple(v - 1 for v in completions[0].logprobs))
    assert look([off, off]) is None
