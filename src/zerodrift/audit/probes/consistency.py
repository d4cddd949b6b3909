"""Rung 2: does the engine agree with itself? The same request, with one thing about its surroundings changed.

Each comparison runs over the tokens that both sides share before they first part ways, because a logprob after a
different token answers a different question. Any difference in bits is listed; it gates only where it is larger
than the audit's own gate.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from zerodrift.audit.answers import generated, scored
from zerodrift.audit.probes.parity import Gates
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, vacuous
from zerodrift.backends.base import Backend, Capability
from zerodrift.core.completion import Completion
from zerodrift.core.errors import BadAnswer
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.task import Scorer
from zerodrift.records.verdict import Outcome


def repeat(engine: Backend, requests: Sequence[Request], gates: Gates, salt: str) -> ProbeResult:
    """The same requests, one at a time, twice; each time with a cold cache where the engine can be told so."""
    if Capability.SEED not in engine.capabilities:
        return not_judged("repeat", "the engine takes no seed, so samples cannot be repeated")
    first = _alone(engine, _cold(engine, requests, f"{salt}-first"))
    second = _alone(engine, _cold(engine, requests, f"{salt}-second"))
    return _compare("repeat", "path/nondeterminism", engine, first, second, gates)


def batch(engine: Backend, requests: Sequence[Request], gates: Gates, salt: str) -> ProbeResult:
    """The same requests, one at a time and all together, with a cold cache both times."""
    if Capability.SEED not in engine.capabilities:
        return not_judged("batch", "the engine takes no seed, so samples cannot be repeated")
    answers = generated(engine, _cold(engine, requests, f"{salt}-together"))
    together = _first([answer.completions for answer in answers])
    alone = _alone(engine, _cold(engine, requests, f"{salt}-alone"))
    return _compare("batch", "path/batch-variance", engine, alone, together, gates)


def cache(engine: Backend, requests: Sequence[Request], gates: Gates, salt: str) -> ProbeResult:
    """The same long prompts with a cold and with a warm prefix cache."""
    needed = {Capability.SEED, Capability.CACHE_SALT, Capability.CACHED_TOKENS}
    if missing := needed - engine.capabilities:
        return not_judged("cache", f"the engine does not offer: {', '.join(sorted(missing))}")
    salted = _cold(engine, requests, f"{salt}-cache")
    cold, warm = _alone(engine, salted), _alone(engine, salted)
    hits = [completion.cached_tokens or 0 for completion in warm]
    if not any(hits) or any(completion.cached_tokens for completion in cold):
        return vacuous(
            "cache", "no prefix was served from the cache: caching is off, or prompts are too short"
        )
    return _compare("cache", "path/prefix-cache", engine, cold, warm, gates, {"cached_tokens": sum(hits)})


def prefill_decode(
    engine: Backend, requests: Sequence[Request], gates: Gates, reference: Scorer, salt: str
) -> ProbeResult:
    """Logprobs reported while decoding, and those of the same tokens as a prompt; the reference says which is right."""
    name = "prefill-decode"
    if Capability.SCORE not in engine.capabilities:
        return not_judged(name, "the engine does not score given tokens")
    plain = [Request(r.prompt, _plain(r.sampling)) for r in requests]
    decoded = _alone(engine, _cold(engine, plain, f"{salt}-decode"))
    sequences = [completion.sequence for completion in decoded]
    prefilled = scored(engine, sequences, engine.name)
    pairs = [
        (np.array(completion.logprobs), scores[len(completion.prompt_token_ids) - 1 :])
        for completion, scores in zip(decoded, prefilled, strict=True)
    ]
    truth = scored(reference, sequences, "the reference")
    wrong = [np.abs(one - other) for one, other in zip(prefilled, truth, strict=True)]
    right = bool(np.concatenate(wrong).mean() <= gates.mean)
    return _judge(name, "path/prefill-decode", engine, pairs, gates, {"prefill_is_right": right})


def _compare(  # noqa: PLR0913 - two sides, and what to say of them
    name: str,
    cause: str,
    engine: Backend,
    first: Sequence[Completion],
    second: Sequence[Completion],
    gates: Gates,
    extra: dict[str, float | int | str | bool] | None = None,
) -> ProbeResult:
    pairs = []
    for one, other in zip(first, second, strict=True):
        shared = _shared(one.token_ids, other.token_ids)
        pairs.append((np.array(one.logprobs[:shared]), np.array(other.logprobs[:shared])))
    return _judge(name, cause, engine, pairs, gates, extra or {})


def _judge(
    name: str,
    cause: str,
    engine: Backend,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    gates: Gates,
    extra: dict[str, float | int | str | bool],
) -> ProbeResult:
    gaps = np.abs(np.concatenate([one - other for one, other in pairs]))
    if len(gaps) == 0:
        return vacuous(name, "the two runs share no token")
    differing = int((gaps > 0).sum())
    evidence = {
        "tokens": len(gaps),
        "differing": differing,
        "mean": float(gaps.mean()),
        "max": float(gaps.max()),
    }
    if not differing:
        return answered(name, Outcome.PASS, f"{len(gaps)} tokens, every bit equal", {**evidence, **extra})
    gating = float(gaps.mean()) > gates.mean
    says = f"{differing} of {len(gaps)} tokens differ, by {gaps.mean():.2g} on average and {gaps.max():.2g} at most"
    cause_found = found(cause, engine.name, name, says, explained=differing / len(gaps), gating=gating)
    status = Outcome.FAIL if gating else Outcome.PASS
    return answered(name, status, says, {**evidence, **extra}, causes=(cause_found,))


def _alone(engine: Backend, requests: Sequence[Request]) -> list[Completion]:
    return _first([generated(engine, [request])[0].completions for request in requests])


def _first(groups: Sequence[tuple[Completion, ...]]) -> list[Completion]:
    if not all(groups):
        raise BadAnswer("the engine gave no usable sample for a request of this probe")
    return [completions[0] for completions in groups]


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens up to and including the first that differs share their context; the differing one is not shared."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


def _cold(engine: Backend, requests: Sequence[Request], salt: str) -> list[Request]:
    """The requests with salts that no request had before, where the engine knows salts."""
    if Capability.CACHE_SALT not in engine.capabilities:
        return list(requests)
    return [
        Request(Prompt(request.prompt.token_ids, request.prompt.text, f"{salt}-{number}"), request.sampling)
        for number, request in enumerate(requests)
    ]


def _plain(sampling: SamplingParams) -> SamplingParams:
    """At temperature 1 without truncation raw and processed logprobs are the same number."""
    return msgspec.structs.replace(
        sampling,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        n=1,
    )
