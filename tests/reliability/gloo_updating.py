"""A trainer with an engine of its own, and an engine in another process, one of which is killed: `gloo_updating.py DIR`.

Reads `WHO POINT LABEL` a line, forks both over gloo, lets WHO die at POINT of the update to LABEL, and says how each ended and
which version each serves when it is started again. `nobody none LABEL` lets both live.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from updating import FIRST, broken_promises, die, loop_of, model_of, say

from zerodrift.core.errors import ZerodriftError
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.gloo import GlooPeers, _Group, serve_gloo
from zerodrift.sync.publisher import WeightPublisher
from zerodrift.sync.target import InProcess

POINTS = {
    ("engine", "manifest"): "old",
    ("engine", "tensors"): "old",
    ("engine", "prepared"): "old",
    ("engine", "voted"): "new",
    ("engine", "published"): "new",
    ("trainer", "tensors"): "old",
    ("trainer", "prepared"): "old",
    ("trainer", "decided"): "new",
    ("trainer", "published"): "new",
}
"""Who dies where, and which version both serve afterwards."""
ROLES = ("trainer", "engine")
PATIENCE = timedelta(seconds=300)


def opened(directory: Path, role: str) -> Updates:
    return Updates(
        loop_of(FIRST), directory / role, retain=2, decided=Decisions(directory / "decisions").made
    )


def dying(point: str, after: Any, owner: Any, name: str) -> None:
    """`owner.name` is done, and then it dies."""

    def method(*given: Any, **named: Any) -> None:
        after(*given, **named)
        die()

    setattr(owner, name, method)


def plant(role: str, point: str) -> None:
    if point == "manifest":
        dying(point, lambda *_: None, _Group, "vote")
    if point == "tensors":
        calls = iter(range(4))
        real = _Group.send
        _Group.send = lambda self, content: real(self, content) if next(calls, None) is not None else die()  # type: ignore[method-assign,assignment,return-value]
    if point == "prepared" and role == "engine":
        dying(point, WeightUpdate.commit, WeightUpdate, "commit")
    if point == "prepared" and role == "trainer":
        dying(point, GlooPeers.prepare, GlooPeers, "prepare")
    if point == "decided":
        dying(point, Decisions.decide, Decisions, "decide")
    if point == "published":
        owner: Any = WeightUpdate if role == "engine" else InProcess
        dying(point, owner.publish, owner, "publish")
    if point == "voted":
        votes = iter(range(1))
        real_vote = _Group.vote

        def vote(self: _Group, refusal: str = "") -> None:
            real_vote(self, refusal)
            if next(votes, None) is None:
                die()

        _Group.vote = vote  # type: ignore[method-assign]


def play(directory: Path, role: str, label: str, name: str) -> None:
    updates = opened(directory, role)
    store = dist.FileStore(str(directory / f"store-{name}"), 2)
    dist.init_process_group("gloo", store=store, rank=ROLES.index(role), world_size=2, timeout=PATIENCE)
    decisions = Decisions(directory / "decisions")
    try:
        if role == "engine":
            serve_gloo(updates, dist.group.WORLD, decisions)
            return
        peers = GlooPeers(dist.group.WORLD)
        WeightPublisher(model_of(label), [InProcess(updates), peers], decisions=decisions).publish(label)
        peers.stop()
    except ZerodriftError as error:
        say(role, "refused", error.code)


def forked(work: Any, *given: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(*given)
        finally:
            os._exit(0)
    return child


def ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def look(directory: Path, role: str) -> None:
    updates = opened(directory, role)
    broken = broken_promises(updates._loop, updates, directory / role, retain=2)
    say(role, "serves", "broken" if broken else updates.current.label)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    say("ready")
    for number, line in enumerate(sys.stdin):
        who, point, label = line.split()

        def act(
            role: str, who: str = who, point: str = point, label: str = label, number: int = number
        ) -> None:
            if role == who:
                plant(role, point)
            play(directory, role, label, str(number))

        children = {role: forked(act, role) for role in ROLES}
        for role, child in children.items():
            if ended(child) == signal.SIGKILL:
                say(role, "killed", point)
        for role in ROLES:
            ended(forked(look, directory, role))
        say("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
