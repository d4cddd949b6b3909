"""The tasks that ship with zerodrift: "3+4=" is to be continued by "7".

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
    digits = 10
    """Summands are below it."""
    before = ""
    """What stands in front of every question."""

    def __init__(self, model: str | Path) -> None:
        """`model` as in `models.load`: its tokenizer writes the questions and reads the answers."""
        self._tokenizer = tokenizer(model)
        asked = [
            (question, answer)
            for question, answer in problems()
            if max(map(int, question[:-1].split("+"))) < self.digits
        ]
        self._prompts = [self._prompt(question) for question, _ in asked]
        self._answers = {
            prompt.token_ids: answer for prompt, (_, answer) in zip(self._prompts, asked, strict=True)
        }

    def _prompt(self, question: str) -> Prompt:
        text = self.before + question
        return Prompt(tuple(self._tokenizer.encode(text)), text)

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


class SmallSums(Sums):
    """The 25 sums of digits up to 4: a step of 25 groups sees each once, and two cores learn them in minutes."""

    name = "small-sums"
    digits = 5

    def lessons(self) -> list[tuple[str, str]]:
        """For a warm-up that shows what an answer looks like, and the right one in 3 of 11 lessons.

        After the hundred sums, whose answers mostly begin with 1 and go on, "1" and an end had p = 0.004 for 0+1=: no
        rollout ever drew it, and what is never drawn is never rewarded.
        """
        return [
            (f"{self.before}{a}+{b}=", str(answer))
            for a in range(self.digits)
            for b in range(self.digits)
            for answer in (*range(2 * self.digits - 1), a + b, a + b)
        ]


class ShownSums(SmallSums):
    """The 25 sums behind three that are done: all prompts begin alike, and fill a block of a prefix cache, as system prompts do."""

    name = "shown-sums"
    before = "1+1=2 2+3=5 4+0=4; "
    """19 tokens of the built-in models; a block has 16."""
