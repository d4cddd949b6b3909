"""A task whose rewards always differ, so that every number of the engine has a part in every step."""

from zerodrift.core.request import Prompt


class Varied:
    name = "varied"

    def prompts(self, count, seed):
        return [Prompt((5 + index % 7, 6 + seed % 3)) for index in range(count)]

    def reward(self, prompt, completion):
        return sum(completion.token_ids) % 101 / 100


task = Varied()
