"""A running vLLM server, seen through the Backend protocol and spoken to as trainers speak to it.

What the server can do is found by asking it when we connect, never by its version string: forks, back-ports and
flags all lie there. What the audit needs beyond that names the flag that would give it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from zerodrift.backends import vllm_facts, vllm_update, vllm_wire
from zerodrift.backends.base import Capability, need
from zerodrift.backends.http import CLOSED, REFUSALS, HttpClient, declined
from zerodrift.backends.pieces import Joined, has_tokens, join
from zerodrift.backends.vllm_routes import ROUTES, check_open, is_nan
from zerodrift.backends.vllm_wire import UNKNOWN
from zerodrift.core.completion import Answer, EngineFingerprint
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineError,
    EngineRefused,
    InvalidPrompt,
    ModelError,
    ModelNotFound,
    NonFinite,
)
from zerodrift.core.request import Prompt, Request
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


class VllmBackend:
    """One model of one vLLM server. A request is one HTTP call; the server makes the batches."""

    name = vllm_facts.ENGINE

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
        self.explicit = explicit
        self._route = ROUTES[route]
        # OpenAI clients are given the address with /v1, so people paste it so.
        self._http = HttpClient(
            url.rstrip("/").removesuffix("/v1"), api_key=api_key, timeout_s=timeout_s, concurrency=concurrency
        )
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

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests in flight together, `concurrency` at a time. `sampling` is reported as it was asked for."""
        return self._ask(requests, lambda request: Joined(self._complete(request), pieces=0))

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """All streams open together, `concurrency` at a time."""
        self._need(Capability.STREAM)
        return self._ask(requests, self._streamed)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs, whatever --logprobs-mode says; vLLM bypasses its prefix cache for such calls."""
        self._need(Capability.SCORE)
        prompts = [Prompt(tuple(sequence)) for sequence in sequences]
        for prompt in prompts:
            self._check_length(len(prompt.token_ids), 1)
        return self._http.each(self._score, prompts)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        self._need(Capability.TOKENIZE)
        return self._tokens({"prompt": text})

    def render_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """As the server does for /v1/chat/completions."""
        self._need(Capability.TOKENIZE)
        return self._tokens({"messages": list(messages), "add_generation_prompt": True})

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Have the server read `directory` itself, under the label `version` where it keeps one.

        vLLM has no rollback: a directory that it cannot read, or whose tensors do not fit, ends its engine process, so
        it is looked at here, beside the served one where that can be seen.
        """
        self._need(Capability.LOAD_WEIGHTS)
        directory = directory.resolve()
        if not directory.is_dir():
            raise ModelNotFound(f"{directory} is no directory; the engine would die of reading it")
        model_directory.check(directory)
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

    def close(self) -> None:
        """The server is not ours and runs on. Safe to call twice."""
        self._http.close()

    def _facts(self, info: vllm_facts.ServerInfo | None) -> EngineFingerprint:
        return vllm_facts.fingerprint(self.model, self.max_model_len, self._route.PATH, info)

    def _ask(self, requests: Sequence[Request], call: Callable[[Request], Joined]) -> list[Answer]:
        for request in requests:
            self._check(request)
        before = self._version()
        answers = self._http.each(call, requests)
        # A label that moved in between belongs to some of these tokens, and nobody can say to which.
        version = before if self._version() == before else UNKNOWN
        context = vllm_wire.Context(vllm_facts.logprob_kind(self._info), version, self._digest)
        return [
            msgspec.structs.replace(
                self._route.read_answer(answer.answer, request, context), pieces=answer.pieces
            )
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _streamed(self, request: Request) -> Joined:
        body, how = self._body(request), self._route.STREAMING
        return join(self._http.stream(self._route.PATH, {**body, **how.ask}), how, self._route.PATH)

    def _complete(self, request: Request) -> object | None:
        return self._call(self._body(request))

    def _body(self, request: Request) -> dict[str, object]:
        return self._route.request_body(request, self.model, explicit=self.explicit)

    def _score(self, prompt: Prompt) -> list[float]:
        answer = self._call(self._route.score_body(prompt.token_ids, self.model))
        if answer is None:
            raise NonFinite("the engine scored a prompt with NaN; look for NaN in its weights")
        return self._route.read_scores(answer, prompt.token_ids)

    def _call(self, body: dict[str, object]) -> object | None:
        """The answer, or None where it held a NaN that the server could not write."""
        reply = self._http.exchange("POST", self._route.PATH, body)
        return None if is_nan(reply) else self._http.read(self._route.PATH, reply)

    def _tokens(self, body: dict[str, object]) -> tuple[int, ...]:
        answer = self._http.post("/tokenize", {"model": self.model, **body})
        return tuple(vllm_wire.parse(answer, _Tokens, "/tokenize").tokens)

    def _version(self) -> WeightVersion:
        if not self._has_label:
            return UNKNOWN
        info = vllm_wire.parse(self._http.get("/weight_info"), _WeightInfo, "/weight_info")
        return WeightVersion(info.weight_version) if info.weight_version else UNKNOWN

    def _check(self, request: Request) -> None:
        """What the server would ignore or cut down in silence is refused before it is sent."""
        sampling = request.sampling
        self._check_length(len(request.prompt.token_ids), sampling.max_tokens)
        for capability, asked_for in (
            (Capability.SEED, sampling.seed is not None),
            (Capability.CACHE_SALT, request.prompt.cache_salt is not None),
            (Capability.TOP_LOGPROBS, bool(sampling.logprobs)),
            (Capability.SCORE, sampling.prompt_logprobs is not None),
        ):
            if asked_for:
                self._need(capability)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        """vLLM would cut max_tokens down to what fits, and say nothing."""
        if prompt_tokens + max_tokens > self.max_model_len:
            raise InvalidPrompt(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed max_model_len="
                f"{self.max_model_len}; shorten one of the two, or start the server with a larger --max-model-len"
            )

    def _need(self, capability: Capability) -> None:
        need(self, capability, HINTS[capability])

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
        path = self._route.PATH
        reply = self._http.exchange("POST", path, self._probe_body({}))
        check_open(self._route, self._http.address, reply)
        response = vllm_wire.parse(self._http.read(path, reply), vllm_wire.Response, path)
        if not any(choice.get("token_ids") for choice in response.choices):
            raise CapabilityMissing(
                "the server ignores return_token_ids, and text cannot be turned back into the sampled ids; "
                "use a release of vLLM that honours it"
            )
        found = {
            Capability.TOP_LOGPROBS: self._takes("logprobs", self._route.ONE_ALTERNATIVE)
            and all(self._reads(name, "?") for name in self._route.MUST_READ),
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
        reply = self._http.exchange("POST", self._route.PATH, self._probe_body({field: value}))
        if reply.status in REFUSALS:
            return is_nan(reply)
        self._http.read(self._route.PATH, reply)
        return True

    def _streams(self) -> bool:
        try:
            path, how = self._route.PATH, self._route.STREAMING
            return has_tokens(self._http.stream(path, self._probe_body(dict(how.ask))), how, path)
        except EngineError as error:
            if declined(error):
                return False
            raise

    def _reads(self, field: str, nonsense: object) -> bool:
        """vLLM ignores fields that it does not know: one that refuses nonsense is one that it reads."""
        return not self._http.can(self._route.PATH, self._probe_body({field: nonsense}), (400, 422))

    def _has_route(self, path: str) -> bool:
        """A route for POST answers GET with 405, and nothing happens; one that is not there answers with 404.

        What a gateway says of routes that it does not let through may be anything, and is no failure of the server.
        """
        return self._http.exchange("GET", path).status == 405

    def _probe_body(self, extra: dict[str, object]) -> dict[str, object]:
        return self._route.probe_body(self.model, extra)
