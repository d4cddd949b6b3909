"""Group by group, what is asked: the task's prompt of that index, and the noise of that index."""

import hashlib

import msgspec

from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.task import Task
from zerodrift.tasks.checked import prompts_of

_ENDLESS = "a training may ask for more than one has: begin again after the last ({} came)"


class PromptStream:
    """Prompt and sampling parameters of group 0, 1, 2 and so on: functions of the seed and the index alone."""

    def __init__(self, task: Task, config: RunConfig, vocab_size: int) -> None:
        """The first prompts are asked for at once: a task that has none is refused before anything is trained."""
        self.task, self._seed, self._vocab_size = task, config.train.seed, vocab_size
        self._sampling = config.sampling_defaults.params()
        self._samples = config.train.samples
        if self._sampling.greedy:
            raise ConfigError(
                "sampling_defaults.temperature is 0: all rollouts of a prompt would be one, and teach nothing"
            )
        self._prompts: list[Prompt] = []
        self._grow(config.train.groups)

    def prompt(self, index: int) -> Prompt:
        """Of group `index`."""
        while index >= len(self._prompts):
            self._grow(2 * len(self._prompts))
        return self._prompts[index]

    def sampling(self, index: int) -> SamplingParams:
        """With a seed of its own: two groups of one prompt draw other noise."""
        digest = hashlib.sha256(f"{self._seed}/{index}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        return msgspec.structs.replace(self._sampling, n=self._samples, seed=seed)

    def _grow(self, count: int) -> None:
        """The stream of a seed is one stream, however much of it is asked for."""
        prompts = prompts_of(self.task, count, self._seed, self._vocab_size, _ENDLESS)
        if prompts[: len(self._prompts)] != self._prompts:
            raise ConfigError(
                f"task {self.task.name!r} gave other prompts for the same seed when it was asked for {count}; its stream "
                "must begin alike however much of it is asked for"
            )
        self._prompts = prompts
