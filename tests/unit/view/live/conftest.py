"""A directory with a short training in it, and a server on it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from zerodrift.monitor.monitor import Monitor
from zerodrift.view.live.access import Access
from zerodrift.view.live.server import LiveServer, open_server
from zerodrift.web.access import names_of

HOST = "127.0.0.1"
SEQUENCES, TOKENS = 16, 40


def observe(monitor: Monitor, step: int, *, nats: float = 0.01, ids: bool = True) -> None:
    rng = np.random.default_rng(step)
    behavior = -rng.exponential(1.0, (SEQUENCES, TOKENS)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    numbers = rng.integers(0, 1000, (SEQUENCES, TOKENS)).tolist()
    monitor.observe(
        behavior_logprobs=behavior,
        old_logprobs=old,
        versions=step,
        trainer_version=step,
        rewards=rng.random(SEQUENCES),
        prompt_ids=[[1, 2, 3]] * SEQUENCES if ids else None,
        completion_ids=numbers if ids else None,
        groups={"environment": ["<b>maths</b>\u202e"] * SEQUENCES},
        step=step,
    )


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Six steps, of which the fourth was kept back."""
    monitor = Monitor(directory=tmp_path / "train")
    for step in range(6):
        observe(monitor, step, nats=0.3 if step == 3 else 0.01)
    monitor.close()
    return tmp_path / "train"


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    """A server on a directory, which ends with the test."""
    servers: list[LiveServer] = []

    def start(directory: Path, token: str | None = None) -> LiveServer:
        server = open_server(directory, HOST, 0, Access(names_of(HOST), token))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.feed.close()
        server.shutdown()
        server.server_close()
