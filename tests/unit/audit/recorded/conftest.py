import pytest

from zerodrift.audit.blame import Blame
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.dump import Dump
from zerodrift.records.dump_formats import DumpFormat
from zerodrift.records.recorded import RecordedRollout


@pytest.fixture
def rollout():
    """A rollout of three tokens, with whatever is asked for."""

    def make(**fields):
        values = {"source": "d", "line": 1, "prompt": (1,), "output": (2, 3, 4), "sampling": SamplingParams()}
        output = fields.get("output", values["output"])
        return RecordedRollout(**{**values, "logprobs": (-1.0,) * len(output), **fields})

    return make


@pytest.fixture(scope="session")
def reference():
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="session")
def engine():
    return ReferenceBackend("testbed:llama", dtype="float32", batch=32)


@pytest.fixture(scope="session")
def sampled():
    """One rollout of each prompt, of 16 to 20 tokens, six of them in a step."""

    def sample(engine, prompts, seed=0):
        requests = [
            Request(
                Prompt(prompt),
                SamplingParams(max_tokens=16 + number % 5, seed=seed + number, ignore_eos=True),
            )
            for number, prompt in enumerate(prompts)
        ]
        answers = [answer.completions[0] for answer in engine.generate(requests)]
        return [
            RecordedRollout(
                source="d",
                line=number + 1,
                step=number // 6,
                prompt=prompt,
                output=answer.token_ids,
                logprobs=answer.logprobs,
                sampling=SamplingParams(),
            )
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    return sample


@pytest.fixture(scope="session")
def judged():
    def judge(rollouts, reference, **options):
        dump = Dump(format=DumpFormat.PLAIN, rollouts=tuple(rollouts), lines=len(rollouts))
        return Blame(dump=dump, reference=reference, **options).run()

    return judge
