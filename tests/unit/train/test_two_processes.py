"""Two processes that were given one directory: what one has begun, or is writing, the other leaves alone."""

from pathlib import Path

import pytest
from tests.unit.train.conftest import small
from tests.unit.train.varied import Varied

from zerodrift.core.errors import ArchiveLocked, ConfigError
from zerodrift.monitor.directory import MonitorDirectory
from zerodrift.train.records import ROLLOUTS, RUN, STEPS
from zerodrift.train.setup import begin, resume


class Beginning(Varied):
    """Whose prompts are asked for while another training begins and ends in the same directory."""

    at: Path | None = None

    def prompts(self, count, seed):
        if self.at is not None:
            directory, self.at = self.at, None
            other = begin(small("train.steps=1", "train.seed=1"), directory)
            other.run(1)
            other.close()
        return super().prompts(count, seed)


task = Beginning()


def test_one_that_began_and_ended_while_another_warmed_up_is_not_begun_again(tmp_path):
    task.at = tmp_path / "run"
    with pytest.raises(ConfigError, match="has a training already"):
        begin(small("train.task=tests.unit.train.test_two_processes:task"), tmp_path / "run")
    assert b'"seed": 1' in (tmp_path / "run" / RUN).read_bytes()


def test_a_resume_beside_the_process_that_writes_touches_nothing(run, tmp_path):
    """A line that is being written looks like one that a kill tore, and was cut off."""
    training = run("train.steps=1")
    training.run(1)
    training.close()
    directory = tmp_path / "run"
    for name in (ROLLOUTS, STEPS):
        with (directory / name).open("ab") as file:
            file.write(b'{"half": ')
    before = {name: (directory / name).read_bytes() for name in (ROLLOUTS, STEPS)}
    held = MonitorDirectory(directory)
    try:
        with pytest.raises(ArchiveLocked, match=r"another process trains in .*wait for its end"):
            resume(directory, steps=2)
    finally:
        held.close()
    assert before == {name: (directory / name).read_bytes() for name in (ROLLOUTS, STEPS)}
