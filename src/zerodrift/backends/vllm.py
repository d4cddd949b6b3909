"""A running vLLM server, seen through the Backend protocol and spoken to as trainers speak to it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from zerodrift.backends import vllm_facts, vllm_update, vllm_wire
from zerodrift.backends.base import Capability
from zerodrift.backends.http import CLOSED, REFUSALS, not_declined
from zerodrift.backends.server import UNKNOWN, ServerBackend, has_route
from zerodrift.backends.stream_deltas import Joined, has_tokens, join
from zerodrift.backends.vllm_routes import ROUTES, is_nan
from zerodrift.core.completion import Answer, EngineFingerprint
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    ModelError,
    NonFinite,
)
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.models import directory as model_directory

DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"

HINTS = {
    Capability.TOP_LOGPROBS: "start the server with --max-logprobs of at least 1 (2 where engine.route is generate)",
    Capability.SCORE: "the server must read prompt_logprobs; a newer release does",
    Capability.SEED: "the server must read seed; a newer release does",
    Capability.CACHE_SALT: "the server must read cache_salt; a newer release does",
    Capability.TOKENIZE: "start the server without --skip-tokenizer-init",
    Capability.CACHED_TOKENS: "start the server with --enable-prompt-tokens-details",
    Capability.RESET_CACHE: DEV_MODE,
    Capability.LOAD_WEIGHTS: DEV_MODE,
    Capability.WEIGHT_VERSION: DEV_MODE,
    Capability.EFFECTIVE_CONFIG: DEV_MODE,
    Capability.STREAM: "its streams must carry token_ids (return_token_ids); those of a newer release do",
}
"""What to type where a capability is missing."""


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """Of an adapter: its base model."""
    root: str | None = None
    """Where the server has it from."""


class _Models(msgspec.Struct):
    data: list[_ModelCard]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Success(msgspec.Struct):
    success: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str


class VllmBackend(ServerBackend):
    """One model of one vLLM server."""

    name = vllm_facts.ENGINE
    hints = HINTS

    def __init__(  # noqa: PLR0913 - what a connection needs, and what the user says of the server
        self,
        url: str,
        *,
        model: str | None = None,
        route: Literal["completions", "generate"] = "completions",
        explicit: bool = False,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        """Connect, and find out what the server can do.

        `model` None takes the one that the server serves. `route` is a name in vllm_routes. `explicit` sends every
        sampling parameter instead of those that differ from their defaults: with it, the server's generation_config.json has nothing to fill.
        """
        super().__init__(url, api_key, timeout_s, concurrency)
        self.explicit = explicit
        self._route = ROUTES[route]
        self._has_route = partial(has_route, self._http, method="GET")
        try:
            self.model, self.max_model_len, self._root = self._choose(model)
            self._info = self._read_info()
            self._digest = self._facts(self._info).digest
            self.update_path = vllm_update.find_path(self._info, self._has_route)
            self._has_label = self._http.find("/weight_info") is not None
            self.capabilities = self._probe()
        except BaseException:
            self.close()
            raise

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

    def render_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """As the server does for /v1/chat/completions."""
        self._need(Capability.TOKENIZE)
        return self._tokens({"messages": list(messages), "add_generation_prompt": True})

    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """Refused where tensors would not fit those that are served, as far as these can be seen."""
        self._check_fits(directory)
        self.update_path.push(self._http, directory, version)

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
        self._need(Capability.RESET_CACHE)
        path = "/reset_prefix_cache"
        if not vllm_wire.parse(self._http.post(path, None), _Success, path).success:
            raise EngineError(
                "vLLM answered success=false to /reset_prefix_cache: requests still hold cached blocks; "
                "wait until they are done, or use a new cache_salt"
            )

    def complete(self, request: Request) -> object | None:
        """None where the answer held a NaN that the server could not write."""
        return self._call(self._body(request))

    def complete_by_stream(self, request: Request) -> Joined:
        """A NaN ends a stream with an error of the server's."""
        path, how = self._route.path, self._route.streaming
        return join(self._http.stream(path, {**self._body(request), **how.ask}), how, path)

    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raw, whatever --logprobs-mode says; vLLM bypasses its prefix cache for such calls."""
        answer = self._call(self._route.score_body(token_ids, self.model))
        if answer is None:
            raise NonFinite("the engine scored a prompt with NaN; look for NaN in its weights")
        return vllm_wire.read_scores(self._route.spread(answer, token_ids), token_ids, self._route.path)

    def _facts(self, info: vllm_facts.ServerInfo | None) -> EngineFingerprint:
        return vllm_facts.fingerprint(self.model, self.max_model_len, self._route.path, info)

    def _ask(self, requests: Sequence[Request], call: Callable[[Request], Joined]) -> list[Answer]:
        for request in requests:
            self._check(request)
        before = self._version()
        came = self._http.each(call, requests)
        # A label that moved in between belongs to some of these tokens, and nobody can say to which.
        version = before if self._version() == before else UNKNOWN
        kind, route = vllm_facts.logprob_kind(self._info), self._route
        reader = vllm_wire.VllmReader(route.path, route.choice, kind, version, self._digest)
        answers = []
        for request, (answer, deltas) in zip(requests, came, strict=True):
            whole = None if answer is None else route.spread(answer, request.prompt.token_ids)
            answers.append(msgspec.structs.replace(reader.answer(whole, request), stream_deltas=deltas))
        return answers

    def _body(self, request: Request) -> dict[str, object]:
        return self._route.request_body(request, self.model, explicit=self.explicit)

    def _call(self, body: dict[str, object]) -> object | None:
        reply = self._http.exchange("POST", self._route.path, body)
        return None if is_nan(reply) else self._http.read(self._route.path, reply)

    def _tokens(self, body: dict[str, object]) -> tuple[int, ...]:
        answer = self._http.post("/tokenize", {"model": self.model, **body})
        return tuple(vllm_wire.parse(answer, _Tokens, "/tokenize").tokens)

    def _version(self) -> WeightVersion:
        if not self._has_label:
            return UNKNOWN
        info = vllm_wire.parse(self._http.get("/weight_info"), _WeightInfo, "/weight_info")
        return WeightVersion(info.weight_version) if info.weight_version else UNKNOWN

    def _choose(self, wanted: str | None) -> tuple[str, int, str | None]:
        cards = vllm_wire.parse(self._http.get("/v1/models"), _Models, "/v1/models").data
        names = [card.id for card in cards]
        if wanted is not None and wanted not in names:
            raise EngineRefused(f"{self._http.address} serves {names}, not {wanted!r}; name one of those")
        # Adapters are listed behind their base model, and only the base says how long a sequence may be.
        lengths = {card.id: card.max_model_len for card in cards if card.max_model_len is not None}
        if not lengths:
            raise BadAnswer(f"{self._http.address}/v1/models shows no max_model_len; is this a vLLM server?")
        if wanted is None and len(lengths) > 1:
            raise EngineRefused(
                f"{self._http.address} serves {names}; say which one is audited: --set engine.served_model={names[0]}"
            )
        [chosen, *_] = [card for card in cards if wanted in (None, card.id)]
        # Of an adapter that does not name its base, what is short enough for every one of them.
        length = lengths.get(chosen.id) or lengths.get(chosen.parent or "") or min(lengths.values())
        return chosen.id, length, chosen.root

    def _read_info(self) -> vllm_facts.ServerInfo | None:
        """The settings in force, where the server shows them in a form that can be read."""
        path = "/server_info?config_format=json"
        answer = self._http.find(path)
        try:
            info = vllm_wire.parse(answer, vllm_facts.ServerInfo, path)
        except BadAnswer:
            return None
        if (info.logprobs_mode or "").endswith("_logits"):
            raise CapabilityMissing(
                f"this server reports logits, not logprobs (--logprobs-mode {info.logprobs_mode}); "
                "start it with --logprobs-mode processed_logprobs"
            )
        return info

    def _probe(self) -> frozenset[Capability]:
        path = self._route.path
        reply = self._http.exchange("POST", path, self._probe_body({}))
        self._route.check_open(self._http.address, reply)
        response = vllm_wire.parse(self._http.read(path, reply), vllm_wire.Response, path)
        if not any(choice.get("token_ids") for choice in response.choices):
            raise CapabilityMissing(
                "the server ignores return_token_ids, and text cannot be turned back into the sampled ids; "
                "use a release of vLLM that honours it"
            )
        found = {
            Capability.TOP_LOGPROBS: self._takes("logprobs", 1 + self._route.more_alternatives)
            and all(self._reads(name, "?") for name in self._route.must_read),
            Capability.SCORE: self._takes("prompt_logprobs", 0) and self._reads("prompt_logprobs", -7),
            Capability.SEED: self._reads("seed", "?"),
            Capability.CACHE_SALT: self._reads("cache_salt", ""),
            Capability.CACHED_TOKENS: response.cached_tokens is not None,
            Capability.TOKENIZE: self._http.can("/tokenize", {"prompt": "a"}, REFUSALS | CLOSED),
            Capability.RESET_CACHE: self._has_route("/reset_prefix_cache"),
            Capability.LOAD_WEIGHTS: self.update_path.exists,
            Capability.WEIGHT_VERSION: self._has_label
            or any(choice.get("weight_versions") for choice in response.choices),
            Capability.EFFECTIVE_CONFIG: self._info is not None,
            Capability.STREAM: self._streams(),
        }
        return frozenset(capability for capability, present in found.items() if present)

    def _takes(self, field: str, value: object) -> bool:
        reply = self._http.exchange("POST", self._route.path, self._probe_body({field: value}))
        if reply.status in REFUSALS:
            return is_nan(reply)
        self._http.read(self._route.path, reply)
        return True

    def _streams(self) -> bool:
        path, how = self._route.path, self._route.streaming
        body = self._probe_body(dict(how.ask))
        return not_declined(lambda: has_tokens(self._http.stream(path, body), how, path))

    def _reads(self, field: str, nonsense: object) -> bool:
        """vLLM ignores fields that it does not know: one that refuses nonsense is one that it reads."""
        return not self._http.can(self._route.path, self._probe_body({field: nonsense}), (400, 422))

    def _probe_body(self, extra: dict[str, object]) -> dict[str, object]:
        return self._route.probe_body(self.model, extra)
