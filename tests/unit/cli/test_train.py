"""What `zerodrift train` refuses before anything is loaded; what it does, tests/reliability/test_train_kill.py shows."""

import pytest

from zerodrift.cli.train import BUNDLED, command
from zerodrift.config.load import load
from zerodrift.config.training import ObjectiveName
from zerodrift.core.errors import ConfigError, RecordError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resume": True}, "name it with --out"),
        ({"until": 3}, "give --replay RUN"),
        ({"resume": True, "out": "runs/a", "settings": ["train.seed=1"]}, "leave out --set"),
        ({"resume": True, "out": "runs/a", "objective": ObjectiveName.GSPO}, "leave out --objective"),
        ({"replay": "runs/a", "steps": 3}, "leave out --steps"),
        ({"replay": "runs/a", "config": "my.yaml"}, "leave out CONFIG"),
        ({"replay": "runs/a", "resume": True}, "leave one of them out"),
    ],
)
def test_options_that_contradict_each_other(given, message):
    with pytest.raises(ConfigError, match=message):
        command(**given)


@pytest.mark.parametrize("given", [{"resume": True, "out": "nowhere"}, {"replay": "nowhere"}])
def test_a_run_that_is_not_there(given, tmp_path):
    given = {key: tmp_path / value if value == "nowhere" else value for key, value in given.items()}
    with pytest.raises(RecordError, match="no training was begun there"):
        command(**given)


def test_what_is_bundled_is_a_configuration():
    assert load(None, BUNDLED).train.task == "small-sums"
