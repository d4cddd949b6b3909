from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerodrift.audit.tasks import Rewarded, check_room, rewarded
from zerodrift.core.completion import Completion, Problem
from zerodrift.core.errors import ConfigError, InvalidValue
from zerodrift.core.request import Prompt, Request
from zerodrift.records.rollout import Rollout
from zerodrift.tasks.checked import open_task, prompts_of
from zerodrift.tasks.sums import Sums

MODEL = "testbed:llama"
PROMPTS = [Prompt((number, 6)) for number in range(4)]


class Toy:
    """Gives what it was told to give."""

    name = "toy"

    def __init__(self, reward: Any = 1.0, prompts: Any = None) -> None:
        self.given, self.asked = reward, PROMPTS if prompts is None else prompts

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        if isinstance(self.asked, Exception):
            raise self.asked
        return self.asked

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given(prompt) if callable(self.given) else self.given


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "their_task.py").write_text(
        "class Task:\n"
        "    name = 'theirs'\n"
        "    def __init__(self, model='none'):\n"
        "        self.model = model\n"
        "    def prompts(self, count, seed):\n"
        "        return []\n"
        "    def reward(self, prompt, completion):\n"
        "        return 0.0\n"
        "ready = Task()\n"
        "number = 3\n"
        "def gives_nothing(model):\n"
        "    return None\n"
        "def fails(model):\n"
        "    raise KeyError('answers.json\\nand more')\n"
        "class Nameless:\n"
        "    def prompts(self, count, seed): ...\n"
        "    def reward(self, prompt, completion): ...\n"
        "nameless = Nameless()\n"
    )
    (tmp_path / "broken_task.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "wrong_task.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return tmp_path


def test_the_one_that_ships():
    assert isinstance(open_task("sums", MODEL), Sums)


@pytest.mark.usefixtures("module")
def test_an_object_of_ones_own_and_a_class_that_is_called_with_the_model():
    assert open_task("their_task:ready", MODEL).model == "none"
    assert open_task("their_task:Task", Path("some/model")).model == "some/model"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nonsense", "names nothing; write sums, small-sums, shown-sums or my_module:task"),
        (":task", "names nothing"),
        ("their_task:", "names nothing"),
        ("no_such_task:task", "there is no module 'no_such_task' here or installed"),
        ("their_task:missing", "module 'their_task' has no 'missing'"),
        ("their_task:number", "is int, which lacks one of `name`"),
        ("their_task:gives_nothing", "is NoneType, which lacks"),
        ("their_task:nameless", "is Nameless, which lacks one of `name`"),
        ("their_task:fails", "'their_task:fails' could not be made: KeyError: 'answers.json"),
        (
            "broken_task:task",
            "could not be made: ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
        ("wrong_task:task", "could not be made: ZeroDivisionError: division by zero"),
    ],
)
def test_what_names_no_task_is_refused(spec, says):
    with pytest.raises(ConfigError, match=says) as caught:
        open_task(spec, MODEL)
    assert "\n" not in str(caught.value)


# --- prompts ----------------------------------------------------------------------------------------------------


def test_prompts_are_the_tasks_own():
    assert prompts_of(Toy(), 4, 0, vocab_size=512, cure="--set validation.num_prompts={}") == PROMPTS


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (RuntimeError("no disk"), "'toy' gave no prompts: RuntimeError: no disk"),
        (3, "gave no prompts: TypeError"),
        ([], r"gave 0 prompts where 4 were asked for; --set validation.num_prompts=1"),
        (PROMPTS[:3], "gave 3 prompts where 4 were asked for; --set validation.num_prompts=3"),
        ([*PROMPTS, *PROMPTS], "gave 8 prompts"),
        ([*PROMPTS[:3], "3+4="], "'toy': prompt 3 is a str; give zerodrift.core.request.Prompt"),
        ([*PROMPTS[:3], Prompt((5000,))], r"'toy': prompt 3: prompt\[0\] is 5000, but the model has 512"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(prompts, says):
    with pytest.raises(ConfigError, match=says):
        prompts_of(Toy(prompts=prompts), 4, 0, vocab_size=512, cure="--set validation.num_prompts={}")


def test_a_prompt_that_does_not_fit_is_refused_and_not_cut():
    long = [*PROMPTS, Prompt((1,) * 30)]
    check_room(Toy(), long, context=40, max_tokens=10)
    with pytest.raises(ConfigError, match=r"'toy': prompt 4 has 30 tokens, .* context of 39"):
        check_room(Toy(), long, context=39, max_tokens=10)


# --- rewards ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(completion):
    made = [
        Rollout(index=n, group="g", request=Request(prompt), completion=completion(prompt.token_ids))
        for n, prompt in enumerate(PROMPTS)
    ]
    lost = Rollout(index=4, group="g", request=Request(PROMPTS[0]), problem=Problem("x", "lost"))
    return [*made, lost]


@pytest.mark.parametrize(
    ("told", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_any_finite_number_is_a_reward(rollouts, told, reward):
    assert rewarded(Toy(told), PROMPTS, rollouts) == [Rewarded(n, reward) for n in range(4)]


def test_equal_prompts_have_one_index(rollouts):
    twice = [PROMPTS[0], PROMPTS[0], *PROMPTS[1:]]
    found = rewarded(Toy(lambda prompt: prompt.token_ids[0]), twice, rollouts)
    assert found == [Rewarded(0, 0.0), Rewarded(2, 1.0), Rewarded(3, 2.0), Rewarded(4, 3.0)]


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        None,
        "1.0",
        [1.0],
        1 + 2j,
        np.ones(2),
        10**400,
        1e101,
        np.nan,
    ],
    ids=repr,
)
def test_what_is_no_reward_is_refused_with_the_prompts_index(rollouts, bad):
    def told(prompt):
        return bad if prompt == PROMPTS[2] else 1.0

    with pytest.raises(InvalidValue, match=r"task 'toy' gave .* as the reward of an answer to prompt 2; "):
        rewarded(Toy(told), PROMPTS, rollouts)


def test_a_task_that_raises_is_told_with_its_name_and_the_prompts_index(rollouts):
    with pytest.raises(
        InvalidValue, match=r"task 'toy' failed on an answer to prompt 0: ValueError: no number$"
    ):
        rewarded(Toy(ValueError("no number\nin\nthis")), PROMPTS, rollouts)
    with pytest.raises(InvalidValue, match=r"prompt 0: AssertionError$"):
        rewarded(Toy(AssertionError()), PROMPTS, rollouts)
