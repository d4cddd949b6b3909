"""One connection to an engine: what is held back, what is cut, and whether the next call may have it."""

import asyncio

import h11
import pytest

from zerodrift.serve.shadow.wire import HELD_BYTES, EngineConnection


class Transport:
    """Notes whether it is read from."""

    def __init__(self):
        self.reading = True

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def write(self, data):
        """Nobody is there."""

    def set_write_buffer_limits(self, high):
        """It takes all at once."""

    def is_closing(self):
        return False


def asked():
    connection, transport = EngineConnection(), Transport()
    connection.connection_made(transport)
    connection.say("GET", b"/", [(b"host", b"x")], b"")
    return connection, transport


async def whole(connection):
    size = 0
    while not isinstance(event := await connection.event(), h11.EndOfMessage):
        size += len(event.data) if isinstance(event, h11.Data) else 0
    return size


def test_an_answer_that_came_faster_than_it_was_taken_leaves_a_connection_that_is_read():
    """The reader had not asked for more when the end was there: nothing would ever have been read again."""
    connection, transport = asked()
    size = HELD_BYTES + 100
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    assert not transport.reading
    assert asyncio.run(whole(connection)) == size
    assert connection.again()
    connection.rest(0.0)
    assert transport.reading
    assert connection.usable


@pytest.mark.parametrize(("why", "is_whole"), [(None, True), (ConnectionResetError("reset"), False)])
def test_an_answer_that_ends_with_its_connection_is_whole_unless_that_was_reset(why, is_whole):
    connection, _ = asked()
    connection.data_received(b"HTTP/1.0 200 OK\r\n\r\nabc")
    connection.connection_lost(why)
    if is_whole:
        assert asyncio.run(whole(connection)) == 3
    else:
        with pytest.raises(h11.RemoteProtocolError, match="reset"):
            asyncio.run(whole(connection))
