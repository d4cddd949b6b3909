"""Many large bodies at once, before an engine that is slow to read them or slow to answer: what the proxy holds is counted."""

import contextlib
import json
import socket
import threading
import time
import tracemalloc

import pytest
from serving import MODEL
from shadowing import shadowing

from zerodrift.serve.limits import ServeLimits

MIB = 2**20
BODY = json.dumps({"prompt": "x" * (6 * MIB)}).encode()
LIMITS = ServeLimits(bodies_bytes=2 * len(BODY) + MIB)
"""Room for two."""
ASK = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
)


class RawEngine:
    """One that takes connections, reads each body where it `reads`, and answers when it is let."""

    def __init__(self, *, reads):
        self.reads, self.go_on, self.read = reads, threading.Event(), 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        # What the system takes before anybody reads is nothing that the proxy holds: keep it small.
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.taken = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self.listening.accept()
                self.taken.append(taken)
                threading.Thread(target=self.answer, args=(taken,), daemon=True).start()

    def answer(self, taken):
        with contextlib.suppress(OSError):
            if self.reads:
                left = len(BODY)
                while left > 0:
                    left -= len(taken.recv(MIB))
                self.read += 1
            self.go_on.wait(20)
            taken.sendall(ANSWER)

    def close(self):
        self.go_on.set()
        self.listening.close()
        for taken in self.taken:
            taken.close()


@pytest.fixture
def engine(request):
    found = RawEngine(reads=request.param)
    yield found
    found.close()


@pytest.fixture
def ask():
    """Send the body, and be left with the connection."""
    with contextlib.ExitStack() as opened:

        def sent(proxy):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", proxy.port)))
            connection.settimeout(20)
            # Who is refused in the middle may find the connection closed.
            with contextlib.suppress(ConnectionError):
                connection.sendall(ASK + BODY)
            return connection

        yield sent


def status(connection):
    return int(connection.recv(4096).split(b" ")[1])


def wait(happened):
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_bodies_that_the_engine_does_not_read_are_counted_until_it_is_gone(engine, ask):
    with shadowing(engine.url, limits=LIMITS) as proxy:
        held = []
        for number in range(1, 3):
            held.append(ask(proxy))
            wait(lambda number=number: len(engine.taken) == number)
        ask(proxy)
        wait(lambda: proxy.server.figures.answers["/v1/completions", 429] == 1)
        for taken in engine.taken:
            taken.close()
        assert [status(each) for each in held] == [502, 502]
        engine.reads = True
        engine.go_on.set()
        assert status(ask(proxy)) == 200


@pytest.mark.parametrize("engine", [True], indirect=True)
@pytest.mark.parametrize("every", [0, 100])
def test_bodies_that_it_has_are_held_no_longer_while_it_generates(engine, ask, every):
    """A thousand rollouts of long prompts are in flight together for minutes."""
    with shadowing(engine.url, limits=LIMITS, rescore_every=every, model=MODEL) as proxy:
        tracemalloc.start()
        try:
            held = []
            for number in range(1, 7):
                held.append(ask(proxy))
                wait(lambda number=number: engine.read == number)
            # The last of each was read by the engine before the proxy's next turn.
            wait(lambda: tracemalloc.get_traced_memory()[0] < len(BODY))
        finally:
            tracemalloc.stop()
        engine.go_on.set()
        assert [status(each) for each in held] == [200] * 6
