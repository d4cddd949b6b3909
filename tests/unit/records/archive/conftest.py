from typing import Any

import pytest

from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans


@pytest.fixture(scope="session")
def made():
    """A batch of a step: `rollouts` of `tokens` each; what else is named goes to every rollout."""

    def make(step=7, state=BatchState.QUARANTINE, *, rollouts=2, tokens=3, **fields):
        usual: dict[str, Any] = {
            "prompt_token_ids": (1, 5 + step),
            "token_ids": tuple(range(10, 10 + tokens)),
            "behavior_logprobs": tuple(-0.1 * place for place in range(tokens)),
            "versions": version_spans([step] * tokens),
        }
        made = [
            ArchivedRollout(**{**usual, "id": f"{step}/{number}", **fields}) for number in range(rollouts)
        ]
        return ArchivedBatch(
            step=step, state=state, reasons=("k3",), trainer_version=str(step), rollouts=tuple(made)
        )

    return make


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "archive"


@pytest.fixture
def small():
    """All healthy batches, and a segment for each batch of a hundred tokens."""
    return ArchiveSettings(healthy_one_in=1, segment_bytes=1024)


@pytest.fixture
def sealed(directory, small, made):
    """Three suspect segments, of steps 0, 1 and 2."""
    with Archive(directory, small) as archive:
        for step in range(3):
            archive.append(made(step, tokens=100))
    assert len(list((directory / "segments").iterdir())) == 3
    return directory
