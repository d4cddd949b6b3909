"""An archived rollout, computed again bit for bit: every token over the KV that it looked back on.

An output that was in flight when weights changed is no single model's doing. Its `versions` say which weights made each
token's logits, `past` and `lineage` which weights wrote the KV below them; with those weights at hand it is all there is to
know, since in exact mode nothing else moves a bit: no neighbour, no chunk, no page.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from zerodrift.core.errors import BitsDiffer, InvalidCompletion, InvalidValue
from zerodrift.core.version import LineagePass, WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output
from zerodrift.engine.plan import Draw, Drawn, Slice, StepPlan
from zerodrift.engine.runner import Runner
from zerodrift.engine.weights import StagedWeights
from zerodrift.exact.paged import PagedKV
from zerodrift.sampler.prefix import Prefix

WeightsOf = Callable[[WeightVersion], StagedWeights]


class ReplayedRollout(NamedTuple):
    """What came of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def check_replay(engine: Engine, output: Output, weights_of: WeightsOf, *, forced: int = 0) -> None:
    """`output` is what its weights give, token by token and bit by bit; or `BitsDiffer` names the first that is not."""
    found = replay(engine, output, weights_of, forced=forced)
    for place, (token, logprob) in enumerate(zip(*found, strict=True)):
        told = output.token_ids[place], output.logprobs[place]
        if (token, logprob.hex()) != (told[0], told[1].hex()):
            raise BitsDiffer(
                f"output token {place} of {output.request_id!r} is {told[0]} with logprob {told[1]!r}, and replayed it is "
                f"{token} with {logprob!r}; it was not made as it says"
            )


@torch.no_grad()
def replay(engine: Engine, output: Output, weights_of: WeightsOf, *, forced: int = 0) -> ReplayedRollout:
    """Draw every token of `output` again. The first `forced` ones were given, and are taken as they are.

    `engine` lends its model's shape and its sampler, and is not changed; `weights_of` gives the weights of a version, as
    `Updates.weights_of` does. An adapter that it was made with must be loaded.
    """
    if dict(output.numeric) != dict(engine.fingerprint().numeric):
        raise InvalidValue(
            "the output was made by an engine that computes in another way; replay it with one of its kind"
        )
    if output.token_ids and not output.lineage:
        raise InvalidCompletion("the output has no lineage, so nobody knows which weights wrote its KV")
    engine.adapters.require_same(output.lora)
    models: dict[WeightVersion, Any] = {}
    drawn: list[Drawn] = []
    for each in _passes(output):
        for segment in each.segments:
            if segment.version not in models:
                models[segment.version] = _model(engine, segment.version, weights_of)
        drawn += _drawn_in(engine, output, each, len(drawn), models, forced)
    return ReplayedRollout(tuple(each.token_id for each in drawn), tuple(each.logprob for each in drawn))


def _passes(output: Output) -> Iterator[LineagePass]:
    done = 0
    for each in (*output.past, LineagePass(len(output.token_ids), output.lineage)):
        if each.end > done:
            yield each
        done = each.end


def _model(engine: Engine, version: WeightVersion, weights_of: WeightsOf) -> Any:
    staged = weights_of(version)
    if staged.version != version:
        raise InvalidValue(
            f"weights of {version.label!r} were asked for, and those of {staged.version.label!r} came"
        )
    return staged.twin_of(engine.model)


def _drawn_in(
    engine: Engine,
    output: Output,
    each: LineagePass,
    begin: int,
    models: dict[WeightVersion, Any],
    forced: int,
) -> list[Drawn]:
    """Tokens from `begin` to the end of one pass: its KV is written as it was, and each token drawn where it was."""
    prompt, sequence = len(output.prompt_token_ids), output.sequence
    last, size = prompt + each.end - 1, engine.scheduler.limits.block_size
    kv = PagedKV(engine.model, -(-last // size), size)
    runners = {version: _runner(engine, models[version], kv) for version in models}
    drawn = []
    for segment in each.segments:
        # A slice draws from its last position alone, so from the first draw on every position is a slice.
        cuts = [cut for cut in range(prompt + begin, last + 1) if segment.start < cut < segment.end]
        for start, end in zip([segment.start, *cuts], [*cuts, segment.end], strict=True):
            place = end - prompt
            draws = (_draw(output, place, forced),) if begin <= place < each.end else ()
            blocks = tuple(range(-(-end // size)))
            part = Slice(0, sequence[start:end], start, blocks, draws, (), 0, lora=output.lora)
            (result,) = runners[segment.version].launch(StepPlan(segment.version, (part,), ())).results()
            drawn += [_require(result.drawn[0]) for _ in draws]
    return drawn


def _runner(engine: Engine, model: Any, kv: PagedKV) -> Runner:
    runner = Runner(model, kv, engine.runner.sampler)
    runner.adapters = engine.runner.adapters
    runner.graphs = None  # to capture one would take longer than the step
    return runner


def _draw(output: Output, place: int, forced: int) -> Draw:
    return Draw(
        0,
        output.sampling,
        output.sample_index,
        output.prompt_token_ids,
        Prefix(output.token_ids, place),
        output.token_ids[place] if place < forced else None,
    )


def _require(drawn: object) -> Drawn:
    if not isinstance(drawn, Drawn):
        raise BitsDiffer(f"replayed, a token could not be drawn: {drawn}")
    return drawn
