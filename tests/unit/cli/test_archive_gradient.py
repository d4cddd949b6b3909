"""`zerodrift archive gradient`: what it prints, and what it refuses."""

import json

import pytest

from zerodrift.cli.main import main
from zerodrift.core.request import SamplingParams
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState


def archive(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["archive", *map(str, arguments)])
    return int(ended.value.code or 0)


def rollout(place: int, **told) -> ArchivedRollout:
    return ArchivedRollout(
        id=str(place),
        prompt_token_ids=(1, 20 + place // 2),
        token_ids=(30, 31 + place, 32),
        behavior_logprobs=(-4.0, -5.0, -4.5),
        sampling=SamplingParams(temperature=0.7),
        **told,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Step 0 has rewards, step 1 none, and step 2 no temperature."""
    place = tmp_path_factory.mktemp("gradient") / "archive"
    known = [{"reward": float(number % 2), "group": str(number // 2)} for number in range(4)]
    with Archive(place, ArchiveSettings(healthy_one_in=1)) as writer:
        for step, rollouts in enumerate((
            [rollout(number, **told, stated=("temperature",)) for number, told in enumerate(known)],
            [rollout(number, stated=("temperature",)) for number in range(4)],
            [rollout(number, **told) for number, told in enumerate(known)],
        )):  # fmt: skip
            writer.append(ArchivedBatch(step=step, state=BatchState.QUARANTINE, rollouts=tuple(rollouts)))
    return place


@pytest.fixture
def named(directory, capsys):
    """Names of the batches, by step."""
    assert archive("ls", directory, "--json") == 0
    return [json.loads(line)["batch"] for line in capsys.readouterr().out.splitlines()]


def test_numbers_for_a_program_and_for_people(directory, named, capsys):
    given = ("gradient", directory, named[0], "--model", "testbed:llama")
    assert archive(*given, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["rollouts"], found["groups"]) == (0, 4, 2)
    assert -1 <= found["whole"]["cosine"] <= 1
    assert {part["kind"] for part in found["parts"]} == {"position", "log p"}
    assert archive(*given, "--epsilon", "0.1") == 0
    shown = capsys.readouterr().out
    assert "[0.9, 1.1]" in shown
    assert f"{found['whole']['tokens']}" in shown


def test_without_rewards_or_a_temperature_it_refuses(directory, named, capsys):
    assert archive("gradient", directory, named[1], "--model", "testbed:llama") == 2
    assert archive("gradient", directory, named[2], "--model", "testbed:llama") == 2
    capsys.readouterr()
    assert (
        archive("gradient", directory, named[2], "--model", "testbed:llama", "--temperature", "0.7", "--json")
        == 0
    )
    assert json.loads(capsys.readouterr().out)["step"] == 2
