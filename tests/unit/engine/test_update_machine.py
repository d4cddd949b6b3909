"""Updates, pauses, aborts, rollbacks, restarts and requests in any order: every promise holds, and a broken one is seen."""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.unit.engine.update_history import Witness, trained

from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.scheduler import Scheduler
from zerodrift.engine.updates import WeightUpdate
from zerodrift.engine.weights import StagedWeights
from zerodrift.weights import history
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.history import violations
from zerodrift.weights.of_model import update_of
from zerodrift.weights.session import Stage

# One in fifty of the profile's examples: one is a whole history, with models that are built and weights on a disk.
MACHINE = settings(max_examples=max(1, settings().max_examples // 50), stateful_step_count=18, deadline=None)
KV = st.sampled_from(["recompute", "keep", "drain"])
LENGTHS = st.integers(1, 6)


class Machine(RuleBasedStateMachine):
    """One trainer that does what it should, others that do not, and users."""

    model: Any
    solo: Engine

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.witness = Witness(self.model, self.directory / "versions")
        self.update: WeightUpdate | None = None
        self.trainer: Any = self.model
        self.labels = itertools.count(1)
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}

    @property
    def current(self) -> str:
        return self.witness.updates.current.label

    @rule(start=st.integers(1, 9), length=st.integers(1, 9), tokens=LENGTHS)
    def ask(self, start: int, length: int, tokens: int) -> None:
        prompt = list(range(start, start + length))
        params = SamplingParams(seed=start, max_tokens=tokens, ignore_eos=True)
        self.requests[self.witness.submit(prompt, params)] = (prompt, params)

    @rule(count=LENGTHS)
    def step(self, count: int) -> None:
        for _ in range(count):
            self.witness.step()

    @rule(data=st.data())
    def abort_one(self, data: st.DataObject) -> None:
        if live := sorted(self.witness.loop.engine.scheduler.requests):
            self.witness.abort(data.draw(st.sampled_from(live)))

    @rule(in_flight=st.sampled_from(["keep", "abort", "drain"]))
    def pause(self, in_flight: str) -> None:
        """Once more: all of it is stepped by hand, so that the loop is paused from the start."""
        loop = self.witness.loop
        loop._between_steps(lambda: None)  # what was submitted is admitted
        never_ends = in_flight == "drain" and loop.engine.has_unfinished
        assert self.witness.attempt(lambda: loop.pause(in_flight=in_flight)) == (not never_ends)
        assert not (in_flight == "abort" and loop.engine.has_unfinished)

    @precondition(lambda self: self.update is None)
    @rule()
    def begin(self) -> None:
        number = next(self.labels)
        self.trainer = trained(self.model, 1 + number / 32)
        manifest = update_of(self.trainer, f"step {number}", self.witness.updates.current)
        assert self.witness.attempt(lambda: self.opened(manifest))
        update = self.update
        assert update is not None
        for name, tensor in checkpoint_state(self.trainer).items():
            update.push(name, tensor)

    def opened(self, manifest: Any) -> None:
        self.update = self.witness.updates.begin(manifest, self.current)

    @precondition(lambda self: self.update is not None)
    @rule()
    def advance(self) -> None:
        assert self.update is not None
        if self.update.stage is Stage.OPEN:
            assert self.witness.attempt(self.update.verify)
        elif self.update.stage is Stage.VERIFIED:
            assert self.witness.attempt(self.update.commit)

    @precondition(lambda self: self.update is not None)
    @rule(kv=KV)
    def publish(self, kv: str) -> None:
        while self.update is not None and self.update.stage is not Stage.COMMITTED:
            self.advance()
        update, self.update = self.update, None
        assert update is not None
        act = self.witness.drain if kv == "drain" else self.witness.attempt
        assert act(lambda: update.publish(kv))

    @precondition(lambda self: self.update is not None)
    @rule()
    def give_up(self) -> None:
        update, self.update = self.update, None
        assert update is not None
        assert self.witness.attempt(update.abort)

    @precondition(lambda self: self.update is None and len(self.witness.updates.retained) > 1)
    @rule(kv=KV)
    def roll_back(self, kv: str) -> None:
        act = self.witness.drain if kv == "drain" else self.witness.attempt
        others = [each.label for each in self.witness.updates.retained if each.label != self.current]
        assert act(lambda: self.witness.updates.rollback(self.current, to=others[-1], kv=kv))

    @rule(kind=st.sampled_from(["second trainer", "stale", "replay", "wrong tensor", "too early", "NaN"]))
    def do_wrong(self, kind: str) -> None:
        assert not self.witness.attempt(self.wrongs(kind))

    def wrongs(self, kind: str) -> Callable[[], object]:
        updates, state = self.witness.updates, checkpoint_state(self.trainer)
        name = next(iter(state))
        if kind == "replay" or self.update is None:
            if kind == "NaN" and self.update is None:
                return self.publish_nan
            label = updates.entries[0].version.label
            return lambda: updates.begin(update_of(self.trainer, label), self.current)
        if kind == "wrong tensor":
            return lambda: self.pushed(name, state[name] + 1)
        if kind == "too early":
            return lambda: self.pushed("nobody's", state[name])
        expected = "no such version" if kind == "stale" else self.current
        return lambda: updates.begin(update_of(self.trainer, "another"), expected)

    def pushed(self, name: str, tensor: torch.Tensor) -> None:
        assert self.update is not None
        self.update.push(name, tensor)

    def publish_nan(self) -> None:
        model = trained(self.model, 1.0)
        with torch.no_grad():
            model.lm_head.weight[1, 1] = torch.nan
        with self.witness.updates.begin(update_of(model, f"nan {next(self.labels)}"), self.current) as update:
            for name, tensor in checkpoint_state(model).items():
                update.push(name, tensor)
            update.verify()

    @rule()
    def restart(self) -> None:
        self.witness.stop()
        self.update = None
        self.witness.start()

    def teardown(self) -> None:
        try:
            while self.witness.loop.engine.has_unfinished:
                self.witness.step()
            self.look_alone()
            found = violations(self.witness.events)
            assert not found, found
        finally:
            self.witness.stop()
            shutil.rmtree(self.directory)

    def look_alone(self) -> None:
        """The last request that came back whole under one version that is still kept."""
        kept = set(self.witness.updates.retained)
        ended = [each for each in self.witness.events if isinstance(each, history.Ended)]
        for event in reversed(ended):
            prompt, params = self.requests[event.request.partition("/")[0]]
            if len(event.versions) == 1 and event.versions[0].version in kept:
                self.witness.alone(self.solo, prompt, params, event.request)
                return


@pytest.fixture
def machine(tiny: Any) -> type[Machine]:
    class Tiny(Machine):
        model = tiny
        solo = Engine(tiny, num_blocks=16, block_size=4)

    return Tiny


def test_every_promise_is_kept(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=MACHINE)


def half_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of the new version never arrives."""
    real = StagedWeights.copy_into

    def copy_into(staged: StagedWeights, model: Any) -> None:
        head = model.lm_head.weight.clone()
        real(staged, model)
        with torch.no_grad():
            model.lm_head.weight.copy_(head)

    monkeypatch.setattr(StagedWeights, "copy_into", copy_into)


def kept_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is kept whatever was asked for."""
    from zerodrift.engine.limits import KVPolicy

    real = Scheduler.swap
    monkeypatch.setattr(
        Scheduler, "swap", lambda self, version, policy=None: real(self, version, KVPolicy.KEEP)
    )


def scripted(machine: type[Machine]) -> None:
    """An update in the middle of a request."""
    one = machine()
    one.ask(1, 5, 6)
    one.step(2)
    one.begin()
    one.publish("recompute")
    one.step(6)
    one.teardown()


def test_the_script_by_itself_is_sound(machine: type[Machine]) -> None:
    scripted(machine)


@pytest.mark.parametrize(("plant", "invariant"), [(half_copied, "I2"), (kept_in_silence, "I3")])
def test_a_planted_fault_is_found(
    machine: type[Machine],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    invariant: str,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError) as found:
        scripted(machine)
    assert f"invariant='{invariant}'" in str(found.value)
