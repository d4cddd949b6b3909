import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.task import Task
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.models.loading import tokenizer as load_tokenizer
from zerodrift.tasks.sums import SmallSums, Sums

MODEL = "testbed:qwen3"


@pytest.fixture(scope="module")
def sums() -> Sums:
    return Sums(MODEL)


def answer(prompt: Prompt, text: str) -> Completion:
    ids = tuple(load_tokenizer(MODEL).encode(text))
    return Completion(
        prompt_token_ids=prompt.token_ids,
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        kind=LogprobKind.PROCESSED,
        sampling=SamplingParams(),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(WeightVersion("a"), 0, len(ids)),) if ids else (),
        fingerprint="fake",
        # What an engine says of its own tokens is not what is rewarded.
        text="something else",
    )


def test_it_is_a_task(sums: Sums) -> None:
    assert isinstance(sums, Task)
    assert sums.name == "sums"


def test_every_sum_comes_once_before_one_comes_twice(sums: Sums) -> None:
    prompts = sums.prompts(230, seed=0)
    assert len(prompts) == 230
    assert len(set(prompts[:100])) == len(set(prompts[100:200])) == 100
    assert sums.prompts(7, seed=0) == prompts[:7], "the beginning of the same stream"
    assert sums.prompts(7, seed=1) != prompts[:7]
    assert sums.prompts(0, seed=0) == []


@pytest.mark.parametrize(
    ("question", "text", "reward"),
    [
        ("3+4=", "7", 1.0),
        ("3+4=", "7<|eos|>", 1.0),
        ("3+4=", "7, of course", 1.0),
        ("9+9=", "18", 1.0),
        ("9+9=", "1", 0.0),
        ("0+1=", "12", 0.0),
        ("3+4=", "8", 0.0),
        ("3+4=", " 7", 0.0),
        ("3+4=", "seven", 0.0),
        ("3+4=", "", 0.0),
    ],
)
def test_the_reward_is_one_where_the_text_begins_with_the_sum(
    sums: Sums, question: str, text: str, reward: float
) -> None:
    (prompt,) = [prompt for prompt in sums.prompts(100, 0) if prompt.text == question]
    assert sums.reward(prompt, answer(prompt, text)) == reward


def test_small_sums_are_those_of_small_digits():
    task = SmallSums("testbed:llama")
    texts = {prompt.text for prompt in task.prompts(25, 0)}
    assert texts == {f"{a}+{b}=" for a in range(5) for b in range(5)}
    assert task.prompts(25, 0) == task.prompts(60, 0)[:25], "one stream, however much of it is asked for"


def test_lessons_show_every_answer_and_the_right_one_more_often():
    """What a warm-up never shows is never drawn, and so never rewarded."""
    lessons = SmallSums("testbed:llama").lessons()
    for question in {question for question, _ in lessons}:
        answers = [answer for asked, answer in lessons if asked == question]
        assert set(answers) == {str(number) for number in range(9)}
        assert answers.count(str(sum(map(int, question[:-1].split("+"))))) / len(answers) == 3 / 11
