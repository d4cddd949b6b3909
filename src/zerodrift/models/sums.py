"""The task that ships with zerodrift: "3+4=" is to be continued by "7".

Built-in models answer it once they are warmed up (`models.materialise("testbed:qwen3", directory, warmup=True)`), and
trained ones often without.
"""

import re
from pathlib import Path

import numpy as np

from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt
from zerodrift.models.loading import tokenizer
from zerodrift.models.warmup import problems


class Sums:
    """The hundred sums of two digits, in an order that the seed decides; from the 101st on they come again."""

    name = "sums"

    def __init__(self, model: str | Path) -> None:
        """`model` as in `models.load`: its tokenizer writes the questions and reads the answers."""
        self._tokenizer = tokenizer(model)
        self._prompts = [
            Prompt(tuple(self._tokenizer.encode(question)), question) for question, _ in problems()
        ]
        self._answers = {
            prompt.token_ids: answer for prompt, (_, answer) in zip(self._prompts, problems(), strict=True)
        }

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """Every sum once before one comes twice."""
        rng = np.random.default_rng(seed)
        rounds = -(-count // len(self._prompts))
        order = np.concatenate([rng.permutation(len(self._prompts)) for _ in range(max(1, rounds))])
        return [self._prompts[number] for number in order[:count]]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """1 where the text begins with the sum and no further digit: 12 is no answer to 0+1."""
        # Out of the ids, by one tokenizer for both sides: engines differ in whether their text shows special tokens.
        begin = re.match(r"\d+", self._tokenizer.decode(completion.token_ids))
        return float(begin is not None and begin[0] == self._answers[prompt.token_ids])
