from collections.abc import Sequence

from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt
from zerodrift.core.task import Scorer, Task


class Half:
    """Everything has probability one half; the reward is its length."""

    name = "half"

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-0.69] * (len(ids) - 1) for ids in sequences]

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        return [Prompt((seed,))] * count

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return float(len(completion.token_ids))


def test_what_has_the_methods_is_one() -> None:
    assert isinstance(Half(), Scorer)
    assert isinstance(Half(), Task)


def test_what_lacks_them_is_none() -> None:
    assert not isinstance(object(), Scorer)
    assert not isinstance(object(), Task)
