"""How a trainer's author holds a monitor: in a `with`, in a message to another process, with a path of the wrong kind."""

import copy
import pickle

import pytest

from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.monitor.decision import State
from zerodrift.monitor.monitor import Monitor


def test_in_a_with_it_lets_go_of_its_directory(tmp_path):
    with Monitor(directory=tmp_path) as monitor:
        assert monitor.log_step(0, 1e-4).state is State.OK
    with Monitor(directory=tmp_path) as again:
        assert again.remembered.step == 0
    with pytest.raises(InvalidValue):
        monitor.log_step(1, 1e-4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kept", [True, False])
def test_a_copy_would_remember_something_else(tmp_path, copied, kept):
    """As an argument of a remote call it would be judged by a twin whose halt nobody hears."""
    monitor = Monitor(directory=tmp_path) if kept else Monitor()
    with pytest.raises(InvalidValue):
        copied(monitor)


@pytest.mark.parametrize("message", [None, ValueError("x"), 3])
def test_an_alert_says_something(tmp_path, message):
    with Monitor(directory=tmp_path) as monitor:
        with pytest.raises(InvalidValue):
            monitor.trigger_alert(message)
        assert monitor.state is State.OK
        assert monitor.log_step(0, 1e-4).state is State.OK


def test_a_path_that_is_a_directory_is_called_one(tmp_path):
    with pytest.raises(RecordError, match="is a directory"):
        Monitor(path=tmp_path)
