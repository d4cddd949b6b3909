"""What is this server, and what can it do? Asked once, when we connect.

A capability is what was seen to work: a field that is read, a value that came back, a route that is there. Nothing
that is asked here changes the server.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect, Facts, SeedProbe
from zerodrift.backends.http import CLOSED, REFUSALS, HttpClient, not_declined
from zerodrift.backends.json_path import facts_at, look_up, put
from zerodrift.backends.openai_wire import ServerSample, asked_kind, request_body, samples_of, value_at
from zerodrift.backends.server import has_route
from zerodrift.backends.stream_deltas import Streaming, has_tokens
from zerodrift.core.completion import EngineFingerprint, LogprobKind
from zerodrift.core.errors import BadAnswer, CapabilityMissing, EngineRefused
from zerodrift.core.request import Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from zerodrift.backends.openai import OpenAIBackend

MODELS = "/v1/models"
ASKED = SamplingParams(max_tokens=8, logprobs=2)
"""More than one token: a server may have no logprob for one of them."""
FLAT = 2.0
"""A temperature at which eight tokens hardly come twice by chance; OpenAI's API ends here."""
SEEDS = (7, 8, 9, 10)
LEAST_DIFFERENT = 3
"""Answers that must differ among those of the seeds: a model that is sure of itself, or ends at once, repeats itself
without any. At worst, with three answers that are equally likely, a server without seeds passes once in 180 times."""


def available_kind(dialect: Dialect, wished: LogprobKind) -> LogprobKind:
    """The kind that is wished for, or the only one there is: processed is every trainer's wish, and not every server's."""
    if wished in dialect.numbers:
        return wished
    if wished is LogprobKind.RAW:
        raise CapabilityMissing(
            f"{dialect.name} cannot be asked for raw logprobs; leave engine.logprobs_mode at processed_logprobs"
        )
    [only] = dialect.numbers
    return only


def choose_model(http: HttpClient, wanted: str | None) -> str:
    """The name under which the server knows the model."""
    names = value_at(http.get(MODELS), "data/*/id", list[str], MODELS)
    if wanted is not None and wanted not in names:
        raise EngineRefused(f"{http.address} serves {names}, not {wanted!r}; name one of those")
    if wanted is None and len(names) != 1:
        raise EngineRefused(
            f"{http.address} serves {names}; say which one is audited: --set engine.served_model=NAME"
        )
    return wanted or names[0]


def shown(http: HttpClient, facts: Facts) -> dict[str, object]:
    """All that the server shows of itself, as one document."""
    document: dict[str, object] = {}
    for route in facts.routes:
        document |= value_at(http.get(route), "", dict[str, object], route)
    return document


def longest(document: object, dialect: Dialect, told: int | None) -> int:
    """Tokens of prompt and output together, as shown, or as the user says where that is not."""
    for path, kept in dialect.facts.max_model_len.items():
        if look_up(document, path) is not msgspec.UNSET:
            return value_at(document, path, int, dialect.facts.routes[0]) - kept
    if told is not None:
        return told
    routes, paths = " and ".join(dialect.facts.routes), list(dialect.facts.max_model_len)
    missing = f"{routes} answered without {paths[0]!r}" if paths else f"{dialect.name} does not show"
    raise BadAnswer(f"{missing}, so how long a sequence may be is not known; {dialect.facts.longer}")


def streaming(document: object, dialect: Dialect) -> Streaming | None:
    """How this server streams, which it may have been told to do in another way than others of its kind."""
    how = dialect.streaming
    if how is None or how.differences is None or look_up(document, how.differences) is not True:
        return how
    return msgspec.structs.replace(how, cumulative=False)


def most_samples(document: object, facts: Facts) -> int | None:
    """How many samples one call may ask for; None where no call asks for more than one."""
    return value_at(document, facts.most_samples, int, facts.routes[0]) if facts.most_samples else None


def fingerprint(backend: "OpenAIBackend", document: object) -> EngineFingerprint:
    """Who computes the numbers, as far as the server shows it in `document`."""
    facts = backend.dialect.facts
    length = longest(document, backend.dialect, backend.max_model_len)
    return EngineFingerprint(
        engine=backend.dialect.name,
        semantic={"model": backend.model, "logprobs_mode": f"{backend.kind}_logprobs"}
        | facts_at(document, facts.semantic),
        numeric=dict(facts.known) | facts_at(document, facts.numeric),
        deployment={"max_model_len": str(length)} | facts_at(document, facts.deployment),
    )


def capabilities(backend: "OpenAIBackend", http: HttpClient, document: object) -> frozenset[Capability]:
    """What was seen to work; a server without ids or logprobs is refused."""
    dialect, facts = backend.dialect, backend.dialect.facts
    prompt = Prompt(backend.spell("a"), "a") if dialect.takes_text else Prompt((0, 0))
    sampling = ASKED
    if all(numbers.alternative_ids is None for numbers in dialect.numbers.values()):
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    request = Request(prompt, sampling)
    [sample, *_] = samples_of(backend.complete(request), dialect) or [ServerSample(None, None)]
    _check_numbers(backend, request, sample)
    numbers = dialect.numbers[asked_kind(sampling, dialect, backend.kind)]
    alternatives = sample.look_up(numbers.alternative_ids)
    updating = dialect.updating
    found = {
        Capability.TOP_LOGPROBS: alternatives is not msgspec.UNSET and any(map(bool, alternatives)),
        Capability.SCORE: dialect.scoring is not None and _scores(backend, prompt),
        Capability.SEED: _honours_seeds(backend, http, request),
        Capability.CACHE_SALT: dialect.salt is not None
        and _refuses(backend, http, request, {dialect.salt: 7}),
        Capability.CACHED_TOKENS: isinstance(sample.look_up(dialect.cached_tokens), int),
        Capability.TOKENIZE: _tokenizes(http, dialect),
        Capability.RESET_CACHE: dialect.reset_cache is not None
        and has_route(http, dialect.reset_cache, "PUT"),
        Capability.LOAD_WEIGHTS: updating is not None and has_route(http, updating.route, "PUT"),
        Capability.WEIGHT_VERSION: updating is not None and bool(sample.look_up(updating.sampled)),
        Capability.EFFECTIVE_CONFIG: bool(facts.effective)
        and all(look_up(document, path) is not msgspec.UNSET for path in facts.effective),
        Capability.STREAM: backend.streaming is not None and _streams(backend, request, backend.streaming),
    }
    return frozenset(capability for capability, present in found.items() if present)


def _check_numbers(backend: "OpenAIBackend", request: Request, sample: ServerSample) -> None:
    """The sample carries ids and logprobs of the kind that is wanted."""
    dialect = backend.dialect
    route = dialect.completions
    if not sample.value_at(dialect.token_ids, list[int], route):
        raise CapabilityMissing(
            f"{route} returns no {dialect.token_ids!r}, and text cannot be turned back into ids"
        )
    numbers = dialect.numbers[asked_kind(request.sampling, dialect, backend.kind)]
    if sample.look_up(numbers.values) in (msgspec.UNSET, None):
        others = [
            f"--set engine.logprobs_mode={kind}_logprobs" for kind in dialect.numbers if kind != backend.kind
        ]
        other = f", or audit the other kind: {others[0]}" if others else ""
        raise CapabilityMissing(
            f"{route} returns no {numbers.values!r}, so the server has no {backend.kind} logprobs; use a newer "
            f"release{other}"
        )


def _scores(backend: "OpenAIBackend", prompt: Prompt) -> bool:
    return not_declined(lambda: len(backend.score_one(prompt.token_ids)) == len(prompt.token_ids) - 1)


def _streams(backend: "OpenAIBackend", request: Request, how: Streaming) -> bool:
    route = backend.dialect.completions
    return not_declined(lambda: has_tokens(backend.streamed(request, how), how, route))


def _honours_seeds(backend: "OpenAIBackend", http: HttpClient, request: Request) -> bool:
    dialect = backend.dialect
    if dialect.seed_probe is SeedProbe.NONSENSE:
        return _refuses(backend, http, request, {dialect.names.get("seed", "seed"): "?"})
    drawn: list[object] = []
    for seed in SEEDS:
        sampling = msgspec.structs.replace(request.sampling, seed=seed, temperature=FLAT)
        once, again = (
            [sample.look_up(dialect.token_ids) for sample in samples_of(backend.complete(asked), dialect)]
            for asked in (Request(request.prompt, sampling),) * 2
        )
        if once != again:
            return False
        drawn += [] if once in drawn else [once]
    # Where all seeds draw alike it cannot be told, and what was not seen to work is no capability.
    return len(drawn) >= LEAST_DIFFERENT


def _refuses(
    backend: "OpenAIBackend", http: HttpClient, request: Request, nonsense: Mapping[str, object]
) -> bool:
    """Servers ignore fields that they do not know: one that refuses nonsense is one that it reads."""
    body = request_body(request, backend.model, backend.dialect, backend.kind)
    for path, value in nonsense.items():
        put(body, path, value)
    reply = http.exchange("POST", backend.dialect.completions, body)
    # SGLang catches nothing around what it makes of the parameters: on nonsense in some it fails, and is well.
    if reply.status not in (400, 422, 500):
        http.read(backend.dialect.completions, reply)
    return reply.status in (400, 422)


def _tokenizes(http: HttpClient, dialect: Dialect) -> bool:
    tokenizer = dialect.tokenizer
    if tokenizer is None or tokenizer.chat_route is None:
        return False
    asked = {
        tokenizer.route: {tokenizer.text: "a", **tokenizer.ask},
        tokenizer.chat_route: {"messages": [{"role": "user", "content": "a"}]},
    }
    # llama.cpp answers 500 where the model's template raises.
    cannot = REFUSALS | CLOSED | {500}
    return all(http.can(route, body, cannot) for route, body in asked.items())
