"""An output that was in flight when weights changed is computed again from what it says of itself."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.engine.support import Make, changed, ended, finished

from zerodrift.core.errors import BitsDiffer, InvalidCompletion, InvalidValue, NotRetained
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineagePass, LineageSegment, WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output
from zerodrift.engine.replay import check_replay, replay
from zerodrift.engine.weights import StagedWeights

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
PARAMS = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)


class Kept:
    """Every version that an engine served."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.staged = {engine.version: engine.retain_weights()}

    def swap(self, scale: float, kv: str) -> WeightVersion:
        staged = self.engine.stage_weights(changed(self.engine, scale), f"{len(self.staged)}")
        self.staged[staged.version] = staged
        return self.engine.swap_weights(staged, kv=kv)

    def __call__(self, version: WeightVersion) -> StagedWeights:
        if version not in self.staged:
            raise NotRetained(version.label)
        return self.staged[version]


def archived(output: Output) -> Output:
    """As it comes back from a file."""
    return msgspec.json.decode(msgspec.json.encode(output), type=Output)


def served(
    engine: Engine, swaps: dict[int, Callable[[], object]], **requests: SamplingParams
) -> list[Output]:
    """Requests that start together, and something that happens after so many steps."""
    for name, params in requests.items():
        engine.add_request(PROMPT[: 3 + len(name)], params, request_id=name)
    outputs, step = [], 0
    while engine.has_unfinished:
        outputs += ended(engine.step())
        step += 1
        if step in swaps:
            swaps[step]()
    return outputs


SAMPLINGS = {
    "a": PARAMS,
    "bb": msgspec.structs.replace(PARAMS, temperature=0.0),
    "ccc": msgspec.structs.replace(PARAMS, top_p=0.8, repetition_penalty=1.2, n=2),
    "dddd": msgspec.structs.replace(PARAMS, top_k=5, min_p=0.05, presence_penalty=0.5, logprobs=2),
}
HISTORIES = {
    "in a prefill": {1: "keep", 2: "keep"},
    "recompute": {3: "recompute", 6: "recompute"},
    "keep, then recompute": {3: "keep", 5: "recompute", 7: "keep"},
}


@pytest.mark.parametrize(
    ("history", "room"), [*((history, 64) for history in HISTORIES), ("keep, then recompute", 12)]
)
def test_bit_for_bit(engine_of: Make, history: str, room: int) -> None:
    engine = engine_of(max_num_batched_tokens=16, max_num_seqs=5, num_blocks=room)
    kept = Kept(engine)
    swaps = {
        step: lambda kv=kv, step=step: kept.swap(1 + step / 50, kv) for step, kv in HISTORIES[history].items()
    }
    outputs = served(engine, swaps, **SAMPLINGS)
    assert (engine.metrics().preemptions > 0) == (room == 12)
    assert max(len(output.versions) for output in outputs) > 1
    assert any(output.past for output in outputs) == ("recompute" in history)
    for output in outputs:
        again = archived(output)
        check_replay(engine, again, kept)
        assert replay(engine, again, kept) == (output.token_ids, output.logprobs)


def test_an_output_of_one_version_is_one_pass(engine_of: Make) -> None:
    engine = engine_of(max_num_batched_tokens=16, max_num_seqs=5, num_blocks=12)
    outputs = served(engine, {}, **SAMPLINGS)
    assert engine.metrics().preemptions > 0
    for output in outputs:
        assert output.past == ()
        check_replay(engine, archived(output), Kept(engine))


@pytest.fixture
def straddling(engine: Engine) -> tuple[Kept, Output]:
    kept = Kept(engine)
    (output,) = served(engine, {4: lambda: kept.swap(1.25, "keep")}, a=PARAMS)
    return kept, archived(output)


def moved(segments: tuple[LineageSegment, ...], by: int) -> tuple[LineageSegment, ...]:
    first, second = segments
    return (
        msgspec.structs.replace(first, end=first.end + by),
        msgspec.structs.replace(second, start=second.start + by),
    )


@pytest.mark.parametrize(
    "forged",
    [
        lambda o: msgspec.structs.replace(o, lineage=moved(o.lineage, 1)),
        lambda o: msgspec.structs.replace(o, lineage=moved(o.lineage, -1)),
        lambda o: msgspec.structs.replace(o, logprobs=(*o.logprobs[:-1], o.logprobs[-1] - 1e-7)),
        lambda o: msgspec.structs.replace(o, token_ids=(*o.token_ids[:-1], (o.token_ids[-1] + 1) % 61)),
        lambda o: msgspec.structs.replace(o, sample_index=1),
        lambda o: msgspec.structs.replace(
            o,
            past=(LineagePass(6, (msgspec.structs.replace(o.lineage[0], end=len(o.prompt_token_ids) + 5),)),),
        ),
    ],
    ids=["later", "earlier", "logprob", "token", "draw", "another pass"],
)
def test_what_was_made_in_another_way_is_seen(
    straddling: tuple[Kept, Output], forged: Callable[[Output], Output]
) -> None:
    kept, output = straddling
    check_replay(kept.engine, output, kept)
    with pytest.raises(BitsDiffer):
        check_replay(kept.engine, forged(output), kept)


def test_it_needs_the_weights_a_lineage_and_an_engine_of_its_kind(
    straddling: tuple[Kept, Output], engine_of: Make
) -> None:
    kept, output = straddling
    gone = kept.staged.pop(output.versions[0].version)
    with pytest.raises(NotRetained):
        replay(kept.engine, output, kept)
    with pytest.raises(InvalidValue):
        replay(kept.engine, output, lambda _: kept.staged[kept.engine.version])
    kept.staged[gone.version] = gone
    with pytest.raises(InvalidCompletion):
        replay(kept.engine, msgspec.structs.replace(output, lineage=()), kept)
    other = msgspec.structs.replace(output, numeric={**output.numeric, "dtype": "another"})
    with pytest.raises(InvalidValue):
        replay(kept.engine, other, kept)


def test_tokens_that_were_given_are_taken_as_they_are(engine: Engine) -> None:
    kept = Kept(engine)
    engine.add_request(PROMPT, PARAMS, forced=[1, 2, 3, 4])
    for _ in range(3):
        engine.step()
    kept.swap(1.25, "keep")
    (output,) = finished(engine)
    assert output.token_ids[:4] == (1, 2, 3, 4)
    check_replay(engine, output, kept, forced=4)
    with pytest.raises(BitsDiffer):
        check_replay(engine, output, kept)


def test_the_engine_is_not_changed(straddling: tuple[Kept, Output]) -> None:
    kept, output = straddling
    before: Any = kept.engine.generate(PROMPT, PARAMS)[0].logprobs
    replay(kept.engine, output, kept)
    kept.engine.reset_cache()
    assert kept.engine.generate(PROMPT, PARAMS)[0].logprobs == before
