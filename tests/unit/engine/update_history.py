"""An engine and its updates, stepped by hand, with all that happens written down for the history checker."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerodrift.core.errors import NotRetained, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.output import Output
from zerodrift.engine.replay import replay
from zerodrift.engine.updates import Updates
from zerodrift.engine.weights import StagedWeights
from zerodrift.weights import history
from zerodrift.weights.digest import model_digest
from zerodrift.weights.registry import Kind, RegistryEntry

RETAIN = 3


def trained(model: Any, scale: float) -> Any:
    """The model with weights of another version."""
    further = copy.deepcopy(model)
    with torch.no_grad():
        for weight in further.parameters():
            weight.mul_(scale)
    return further


def bits_of(output: Any) -> tuple[tuple[int, str], ...]:
    return tuple((token, value.hex()) for token, value in zip(output.token_ids, output.logprobs, strict=True))


def event_of(entry: RegistryEntry, in_flight: tuple[str, ...] = ()) -> history.AnyEvent:
    """A line of the registry, as something that happened while these requests were under way."""
    if entry.kind is Kind.COMMITTED:
        return history.Committed(version=entry.version)
    if entry.kind is not Kind.PUBLISHED:
        return history.Dropped(label=entry.version.label)
    under_way = () if entry.kv == "drain" else in_flight
    return history.Published(version=entry.version, follows=entry.follows, kv=entry.kv, in_flight=under_way)


def ended(name: str, output: Output) -> history.Ended:
    """A request came back."""
    return history.Ended(
        request=name,
        bits=bits_of(output),
        prompt_length=len(output.prompt_token_ids),
        versions=output.versions,
        lineage=output.lineage,
    )


def broken_promises(
    loop: EngineLoop, updates: Updates, directory: Path, retain: int = 4
) -> list[history.Violation]:
    """After a fault, with nothing in flight: all that was ever published, the weights as they are, a request in company, computed
    again by the weights that it names, and alone, and how much lies on the disk."""
    events = [event_of(entry) for entry in updates.entries]
    engine, params = loop.engine, SamplingParams(seed=5, max_tokens=3, ignore_eos=True)
    prompt, neighbour = [5, 6, 7, 8, 9], [5, 6, 7, 8, 4, 3]
    loop.reset_cache()
    handles = [loop.submit(each, params) for each in (neighbour, prompt)]
    outputs = [handle.result()[0] for handle in handles]
    loop.reset_cache()
    alone = loop.submit(prompt, params).result()[0]
    events += [
        history.Stepped(version=engine.version, digest=model_digest(engine.model)),
        ended("neighbour", outputs[0]),
        ended("one", outputs[1]),
        history.Recomputed(request="one", bits=bits_of(replay(engine, outputs[1], updates.weights_of))),
        history.Alone(request="one", bits=bits_of(alone)),
        history.Sized(
            what="versions on the disk", value=len(list((directory / "weights").iterdir())), cap=retain
        ),
    ]
    return history.violations(events)


class Witness:
    """Starts an engine over `directory`; everything it is asked to do becomes an event."""

    def __init__(self, model: Any, directory: Path) -> None:
        self._model, self._directory = model, directory
        self.events: list[history.AnyEvent] = []
        self._told = 0
        self._in_flight: tuple[str, ...] = ()
        self._seen: dict[WeightVersion, StagedWeights] = {}
        self._numbers = 0
        self.start()

    def start(self) -> None:
        """Anew, as after a kill: nothing is in flight."""
        self.loop = EngineLoop(Engine(self._model, num_blocks=16, block_size=4, version="first"))
        self.loop.pause()
        again = bool(self.events)
        self.updates = Updates(self.loop, self._directory, retain=RETAIN)
        self.tell()
        if again:
            self.events.append(history.Restarted(version=self.loop.engine.version))

    def stop(self) -> None:
        self.loop.stop(drain=False)
        self.updates.close()

    def tell(self) -> None:
        """What the registry says that happened since."""
        entries = self.updates.entries
        self.events += [event_of(entry, self._in_flight) for entry in entries[self._told :]]
        self._told = len(entries)
        kept = len(list((self._directory / "weights").iterdir()))
        self.events.append(history.Sized(what="versions on the disk", value=kept, cap=RETAIN + 1))

    def attempt(self, act: Callable[[], object]) -> bool:
        """Something that may be refused; whether it was not."""
        self._in_flight = tuple(f"{name}/0" for name in self.loop.engine.scheduler.requests)
        try:
            act()
        except ZerodriftError as error:
            self.events.append(history.Refused(code=error.code))
            self.tell()
            return False
        self.tell()
        return True

    def submit(self, prompt: list[int], params: SamplingParams) -> str:
        self._numbers += 1
        name = f"r{self._numbers}"
        self.loop.submit(prompt, params, request_id=name)
        return name

    def step(self) -> None:
        """One forward, by hand, and what came of it."""
        engine = self.loop.engine
        self.loop._between_steps(lambda: None)  # what was submitted is admitted
        if not engine.has_unfinished:
            return
        version, digest = engine.version, model_digest(engine.model)
        self.events.append(history.Stepped(version=version, digest=digest))
        updates = self.loop._between_steps(engine.step)
        self.loop._between_steps(lambda: self.loop._deliver(updates))
        for update in updates:
            if update.output is not None:
                self.end(update.output)

    def abort(self, name: str) -> None:
        self.loop.abort(name)
        self.loop._between_steps(lambda: None)

    def drain(self, act: Callable[[], object]) -> bool:
        """An act that waits for the end of all requests, which are stepped to it meanwhile."""
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(self.attempt(act)))
        thread.start()
        while thread.is_alive():
            if self.loop._when_empty:
                self.step()
            thread.join(0.002)
        return done[0]

    def end(self, output: Output) -> None:
        """A request came back: it is computed again by its segments, and again alone."""
        name = f"{output.request_id}/{output.sample_index}"
        self.events.append(ended(name, output))
        try:
            again = replay(self.loop.engine, output, self.weights_of)
        except NotRetained:
            return
        self.events.append(history.Recomputed(request=name, bits=bits_of(again)))

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        if version not in self._seen:
            self._seen[version] = self.updates.weights_of(version)
        return self._seen[version]

    def alone(self, solo: Engine, prompt: list[int], params: SamplingParams, name: str) -> None:
        """A request of one version, served again with nobody beside it."""
        (event,) = [each for each in self.events if isinstance(each, history.Ended) and each.request == name]
        (span,) = event.versions
        solo.swap_weights(self.weights_of(span.version))
        (output,) = solo.generate(prompt, params)
        self.events.append(history.Alone(request=name, bits=bits_of(output)))
