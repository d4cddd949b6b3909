"""A running vLLM server, seen through the Backend protocol and spoken to as trainers speak to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from zerodrift.backends import vllm_facts, vllm_update
from zerodrift.backends.base import Capability
from zerodrift.backends.http import CLOSED, REFUSALS
from zerodrift.backends.json_path import look_up
from zerodrift.backends.samples import ToldSample, parse, value_at
from zerodrift.backends.server import MODELS, UNKNOWN, ServerBackend
from zerodrift.backends.vllm_routes import PREFIX, ROUTES, Choice, Response, Usage, is_nan, likeliest
from zerodrift.core.completion import Answer, EngineFingerprint, Problem
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    InvalidCompletion,
    ModelError,
    NonFinite,
)
from zerodrift.core.request import Request
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.models import directory as model_directory

DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"

PAUSE, RESUME, RESET = "/pause", "/resume", "/reset_prefix_cache"

LONG_PROMPT = 300
"""Tokens that fill a block of any prefix cache: vLLM's have 16 on a GPU and 128 on a CPU."""

HINTS = {
    Capability.TOP_LOGPROBS: "start the server with --max-logprobs of at least 1 (2 where engine.route is generate)",
    Capability.SCORE: "the server must read prompt_logprobs; a newer release does",
    Capability.SEED: "the server must read seed; a newer release does",
    Capability.CACHE_SALT: "the server must read cache_salt; a newer release does",
    Capability.TOKENIZE: "start the server without --skip-tokenizer-init",
    Capability.CACHED_TOKENS: "start the server with --enable-prompt-tokens-details",
    Capability.RESET_CACHE: DEV_MODE,
    Capability.LOAD_WEIGHTS: f"{DEV_MODE}; a release without /collective_rpc takes new weights by a restart alone",
    Capability.WEIGHT_VERSION: f"{DEV_MODE}; a release without /weight_info has no label",
    Capability.EFFECTIVE_CONFIG: f"{DEV_MODE}; an old release writes its settings as one text, which is not read",
    Capability.STREAM: "its streams must carry token_ids (return_token_ids); those of a newer release do",
}
"""What to type where a capability is missing."""


class VllmBackend(ServerBackend):
    """One model of one vLLM server."""

    name = vllm_facts.ENGINE
    hints = HINTS
    label_route = "/weight_info"
    _returns_ids = True
    """Releases before 0.10.2 do not know return_token_ids; the logprobs of all of them name their tokens by id."""

    _kept_back: int | None = None
    """What the server answered in place of its settings, where it has them and wants another token or address."""

    _silent_at_none = False
    """It counts what came from the cache, and does not mention a count of nothing."""

    def __init__(
        self,
        url: str,
        *,
        route: Literal["completions", "generate"] = "completions",
        explicit: bool = False,
        **connection: Any,
    ) -> None:
        """`route` is a name in vllm_routes. `explicit` sends every sampling parameter instead of those that differ from
        their defaults: with it, the server's generation_config.json has nothing to fill.
        """
        self.explicit = explicit
        self._route = ROUTES[route]
        self.path, self.streaming = self._route.path, self._route.streaming
        super().__init__(url, **connection)

    def fingerprint(self) -> EngineFingerprint:
        """As the server shows it now: one that was started anew has lost the weights that were pushed into it."""
        now = self._read_info()
        facts = self._facts(now)
        if now is None or self._info is None or now.instance == self._info.instance:
            return facts
        restarted = {**facts.deployment, "started_anew": "since we connected"}
        return msgspec.structs.replace(facts, deployment=restarted)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        self._need(Capability.TOKENIZE)
        return self._tokens({"prompt": text})

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """As the server does for /v1/chat/completions."""
        self._need(Capability.TOKENIZE)
        return self._tokens({"messages": list(messages), "add_generation_prompt": generation_prompt})

    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """Refused where tensors would not fit those that are served, as far as these can be seen."""
        self._check_fits(directory)
        self.update_path.push(self._http, directory, version)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is in flight ends first, and what comes meanwhile waits: no request sees two versions."""
        pause = f"{PAUSE}?mode=wait"
        can = self._ask_route(PAUSE)
        if can:
            self._http.post(pause, None)
        try:
            yield
        finally:
            if can:
                self._http.post(RESUME, None)

    def _check_fits(self, directory: Path) -> None:
        """Tensors of one name have one shape; a name that only one side has is vLLM's to judge (heads may be tied)."""
        if self._root is None or not (served := Path(self._root)).is_dir():
            return
        ours, theirs = model_directory.shapes(directory), model_directory.shapes(served)
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                raise ModelError(
                    f"{directory} holds another model than {served}, which is served: {name} has shape {ours[name]} "
                    f"in place of {theirs[name]}, and the engine would die of it; give a checkpoint of the same model"
                )

    def reset_cache(self) -> None:
        """Only an idle server can: with requests in flight it answers 200 and resets nothing."""
        if not self.drop_cache():
            self._see_reset(RESET)

    def drop_cache(self) -> bool:
        """As `reset_cache`, also while it is paused; False where the server does not say whether it did."""
        self._need(Capability.RESET_CACHE)
        if (answer := self._http.post(RESET, None)) is None:
            return False
        if not value_at(answer, "success", bool, RESET):
            raise EngineError(
                "vLLM answered success=false to /reset_prefix_cache: requests still hold cached blocks; "
                "wait until they are done, or use a new cache_salt"
            )
        return True

    def body(self, request: Request) -> dict[str, Any]:
        """As the route has it."""
        return self._route.request_body(request, self.model, explicit=self.explicit)

    def complete(self, request: Request) -> object | None:
        """None where the answer held a NaN that the server could not write; in a stream it is an error of the server's."""
        return self._call(self.body(request))

    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raw, whatever --logprobs-mode says. vLLM bypasses its prefix cache for such calls, and cannot generate nothing,
        so one greedy token is thrown away.
        """
        asked = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = self._call(self._route.body(token_ids, self.model, asked))
        if answer is None:
            raise NonFinite("the engine scored a prompt with NaN; look for NaN in its weights")
        choices = self._route.choices(answer, token_ids)
        choice = parse(choices[0] if choices else None, Choice, self.path)
        if not self._returns_ids:
            choice.prompt_token_ids = [token_ids[0], *choice.scored_ids()]
        if choice.prompt_token_ids != list(token_ids):
            raise BadAnswer(f"{self.path} was sent {len(token_ids)} token ids, and scored others")
        return [value for value in choice.scored_prompt() if value is not None]

    def _connect(self, model: str | None) -> None:
        self._ask_route = partial(self._has_route, method="GET")
        self.model, self.max_model_len, self._root = self._card(model)
        self._info = self._read_info()
        self.update_path = vllm_update.find_path(self._info, self._ask_route)
        self._has_label = self._http.find(self.label_route) is not None

    def _facts(self, info: vllm_facts.ServerInfo | None) -> EngineFingerprint:
        release = self._release() if info is None else None
        shown = vllm_facts.fingerprint(
            self.model, self.max_model_len, self.path, info, release, kept_back=self._kept_back
        )
        if self._returns_ids:
            return shown
        deployment = {
            **shown.deployment,
            "token_ids": "those that the logprobs name; of a prompt its length alone",
        }
        return msgspec.structs.replace(shown, deployment=deployment)

    def _release(self) -> str | None:
        """As the server calls itself, for the record; nothing is decided by it."""
        try:
            return value_at(self._http.find("/version"), "version", str, "/version")
        except BadAnswer:
            return None

    def _read(self, answers: Sequence[object], request: Request, version: WeightVersion) -> Answer:
        if answers == [None]:
            problem = Problem(
                NonFinite.code, "the engine computed NaN and could not write it; look for NaN in its weights"
            )
            return Answer((), (problem,) * request.sampling.n)
        return super()._read(answers, request, version)

    def _numbered(self, answers: Sequence[object], request: Request) -> list[tuple[int, Any]]:
        [answer] = answers
        usage = parse(answer, Response, self.path).usage or Usage()
        choices = self._route.choices(answer, request.prompt.token_ids)
        return [(value_at(choice, "index", int, self.path), (choice, usage)) for choice in choices]

    def _sample(self, raw: Any, request: Request, version: WeightVersion) -> ToldSample:
        choice, sampling = parse(raw[0], Choice, self.path), request.sampling
        usage: Usage = raw[1]
        if not self._returns_ids:
            choice.take_names(usage, request.prompt.token_ids)
        if choice.token_ids is None or choice.prompt_token_ids is None:
            raise InvalidCompletion(
                "the engine returned no token ids, or counted others than the prompt's; it must honour return_token_ids"
            )
        if choice.logprobs is None:
            raise InvalidCompletion("the sample carries no logprobs; ask for them with logprobs=0 or more")
        told = self._route.told(choice.logprobs)
        return ToldSample(
            prompt_token_ids=choice.prompt_token_ids,
            token_ids=choice.token_ids,
            owners=told.owners,
            logprobs=told.logprobs,
            top_logprobs=likeliest(told, choice.token_ids, sampling.logprobs or 0),
            prompt_logprobs=() if sampling.prompt_logprobs is None else choice.scored_prompt(),
            kind=vllm_facts.logprob_kind(self._info),
            finish_reason=choice.reason,
            versions=_versions(choice, version),
            cached_tokens=0 if self._silent_at_none and usage.cached_tokens is None else usage.cached_tokens,
            text=choice.text,
            # Of several samples only the sum is told. Ids of their own would show what the logprobs leave out.
            made=None if self._returns_ids or sampling.n > 1 else usage.completion_tokens,
        )

    def _call(self, body: dict[str, Any]) -> object | None:
        reply = self._http.exchange("POST", self.path, body)
        return None if is_nan(reply) else self._http.read(self.path, reply)

    def _tokens(self, body: dict[str, object]) -> tuple[int, ...]:
        answer = self._http.post("/tokenize", {"model": self.model, **body})
        return tuple(value_at(answer, "tokens", list[int], "/tokenize"))

    def _card(self, wanted: str | None) -> tuple[str, int, str | None]:
        cards = self._choose(wanted)
        # Adapters are listed behind their base model, and only the base says how long a sequence may be.
        lengths = {card.id: card.max_model_len for card in cards if card.max_model_len is not None}
        if not lengths:
            raise BadAnswer(f"{self._http.address}{MODELS} shows no max_model_len; is this a vLLM server?")
        if wanted is None and len(lengths) > 1:
            self._only(cards)
        [chosen, *_] = [card for card in cards if wanted in (None, card.id)]
        # Of an adapter that does not name its base, what is short enough for every one of them.
        length = lengths.get(chosen.id) or lengths.get(chosen.parent or "") or min(lengths.values())
        return chosen.id, length, chosen.root

    def _read_info(self) -> vllm_facts.ServerInfo | None:
        """The settings in force, where the server shows them in a form that can be read."""
        path = "/server_info?config_format=json"
        try:
            answer = self._http.get(path)
        except EngineRefused as error:
            if error.status not in CLOSED | {404}:
                raise
            self._kept_back = error.status if error.status in CLOSED else None
            return None
        try:
            info = parse(answer, vllm_facts.ServerInfo, path)
        except BadAnswer:
            return None
        if (info.logprobs_mode or "").endswith("_logits"):
            raise CapabilityMissing(
                f"this server reports logits, not logprobs (--logprobs-mode {info.logprobs_mode}); "
                "start it with --logprobs-mode processed_logprobs"
            )
        return info

    def _probe(self) -> dict[Capability, bool]:
        reply = self._http.exchange("POST", self.path, self._probe_body())
        self._route.check_open(self._http.address, reply)
        response = parse(self._http.read(self.path, reply), Response, self.path)
        self._returns_ids = any(choice.get("token_ids") for choice in response.choices)
        if not (self._returns_ids or self._names_ids()):
            raise CapabilityMissing(
                "the server ignores return_token_ids, and return_tokens_as_token_ids too, and text cannot be turned back "
                "into the sampled ids; use a release of vLLM that honours one of them"
            )
        # What is said of ids is a fact of the server, too.
        self._digest = self._facts(self._info).digest
        return {
            Capability.TOP_LOGPROBS: self._takes("logprobs", 1 + self._route.more_alternatives)
            and all(self._reads(self._probe_body(name, "?")) for name in self._route.must_read),
            Capability.SCORE: self._takes("prompt_logprobs", 0)
            and self._reads(self._probe_body("prompt_logprobs", -7)),
            Capability.SEED: self._reads(self._probe_body("seed", "?")),
            Capability.CACHE_SALT: self._reads(self._probe_body("cache_salt", "")),
            Capability.CACHED_TOKENS: self._counts_cached(response),
            Capability.TOKENIZE: self._http.can("/tokenize", {"prompt": "a"}, REFUSALS | CLOSED),
            Capability.RESET_CACHE: self._ask_route(RESET),
            Capability.LOAD_WEIGHTS: self.update_path.exists,
            Capability.WEIGHT_VERSION: self._has_label
            or any(choice.get("weight_versions") for choice in response.choices),
            Capability.EFFECTIVE_CONFIG: self._info is not None,
            # Where logprobs alone name ids, they must be asked for.
            Capability.STREAM: self._streams(
                self._probe_body(*(() if self._returns_ids else ("logprobs", 0)))
            ),
        }

    def _counts_cached(self, first: Response) -> bool:
        """Whether it says how much came from the cache; 0.18 says so only where something did, so it is asked twice."""
        if first.usage is not None and first.usage.cached_tokens is not None:
            return True
        self._silent_at_none = [self._cached_of_long() for _ in range(2)][-1] > 0
        return self._silent_at_none

    def _cached_of_long(self) -> int:
        """How much of one long prompt, the same at every call, came from the cache."""
        long = (0,) * min(self.max_model_len - 1, LONG_PROMPT)
        body = self._route.body(long, self.model, {"max_tokens": 1, "temperature": 0})
        usage = parse(self._call(body), Response, self.path).usage
        return (usage and usage.cached_tokens) or 0

    def _see_reset(self, path: str) -> None:
        """Releases up to 0.18 at least answer 200 and nothing else, so it is looked whether a reset forgets."""
        if Capability.CACHED_TOKENS not in self.capabilities:
            raise EngineError(
                f"this vLLM answers nothing to {path}, and counts no cached tokens, so nobody can say whether it forgot; "
                "start it without --enable-prefix-caching, or anew after every update"
            )
        self._cached_of_long()
        self._http.post(path, None)
        if cached := self._cached_of_long():
            raise EngineError(
                f"vLLM answered nothing to {path}, and {cached} tokens of a prompt still came from the cache; wait until "
                "other requests are done, or use a new cache_salt"
            )

    def _names_ids(self) -> bool:
        """Whether logprobs name their tokens by id, which tells the ids of a sample where nothing else does."""
        answer = self._call(self._probe_body("logprobs", 0))
        [first, *_] = parse(answer, Response, self.path).choices or [{}]
        names = look_up(first, "logprobs/tokens")
        return isinstance(names, list) and bool(names) and all(str(name).startswith(PREFIX) for name in names)

    def _takes(self, field: str, value: object) -> bool:
        reply = self._http.exchange("POST", self.path, self._probe_body(field, value))
        if reply.status in REFUSALS:
            return is_nan(reply)
        self._http.read(self.path, reply)
        return True

    def _probe_body(self, field: str = "", value: object = None) -> dict[str, Any]:
        return self._route.probe_body(self.model, {field: value} if field else {})


def _versions(choice: Choice, now: WeightVersion) -> tuple[VersionSpan, ...]:
    """As the server says; what it calls its weights now, where it says nothing.

    Two updates between two tokens leave a span without a token in between.
    """
    if choice.weight_versions is None:
        return (VersionSpan(now, 0, len(choice.token_ids)),) if choice.token_ids else ()
    return tuple(
        VersionSpan(
            WeightVersion(span.version, span.digest) if span.version else UNKNOWN, span.start, span.end
        )
        for span in choice.weight_versions
        if span.start != span.end
    )
