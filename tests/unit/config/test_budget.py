import pytest

from zerodrift.config.budget import seconds_of
from zerodrift.core.errors import ConfigError


@pytest.mark.parametrize(("typed", "seconds"), [("90s", 90.0), ("2m", 120.0), (" 1.5h ", 5400.0)])
def test_times_as_people_write_them(typed, seconds):
    assert seconds_of(typed) == seconds


@pytest.mark.parametrize("typed", ["", "10", "ten", "2 m", "-5m", "1h30m", "5s", "25h", "nanm", "1e3s"])
def test_what_is_no_time_for_an_audit_is_refused(typed):
    with pytest.raises(ConfigError):
        seconds_of(typed)
