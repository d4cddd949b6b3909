"""A server that is described by a dialect, seen through the Backend protocol.

The dialect says how things are called; what is asked of this server and not given is refused with the flag that would
give it.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from zerodrift.backends import openai_probe
from zerodrift.backends.base import Capability
from zerodrift.backends.dialects.facts import Dialect
from zerodrift.backends.http import Stream
from zerodrift.backends.json_path import put
from zerodrift.backends.openai_wire import (
    Reader,
    one_by_one,
    prompt_body,
    read_scores,
    request_body,
    untruncated,
    value_at,
)
from zerodrift.backends.server import UNKNOWN, ServerBackend
from zerodrift.backends.stream_deltas import Joined, Streaming, join
from zerodrift.core.completion import Answer, EngineFingerprint, LogprobKind
from zerodrift.core.errors import CapabilityMissing, EngineError, InvalidPrompt, InvalidSampling
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion


class OpenAIBackend(ServerBackend):
    """One model of one server of the kind that the dialect describes."""

    def __init__(  # noqa: PLR0913 - what a connection needs, and what the user says of the server
        self,
        url: str,
        dialect: Dialect,
        *,
        kind: LogprobKind = LogprobKind.PROCESSED,
        model: str | None = None,
        max_model_len: int | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        """Connect, and find out what the server can do.

        `model` None takes the one that the server serves; `max_model_len` is for servers that do not show theirs.
        """
        self.dialect = dialect
        self.name = dialect.name
        self.hints = dialect.hints
        self.kind = openai_probe.available_kind(dialect, kind)
        super().__init__(url, api_key, timeout_s, concurrency)
        self._spelled: dict[str, tuple[int, ...]] = {}
        try:
            self.model = openai_probe.choose_model(self._http, model)
            shown = openai_probe.shown(self._http, dialect.facts)
            self.max_model_len = openai_probe.longest(shown, dialect, max_model_len)
            self.streaming = openai_probe.streaming(shown, dialect)
            self._most_samples = openai_probe.most_samples(shown, dialect.facts)
            self._digest = openai_probe.fingerprint(self, shown).digest
            self.capabilities = openai_probe.capabilities(self, self._http, shown)
        except BaseException:
            self.close()
            raise

    def fingerprint(self) -> EngineFingerprint:
        """As the server shows it now: one that was started anew may show other settings."""
        return openai_probe.fingerprint(self, openai_probe.shown(self._http, self.dialect.facts))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the server does for a plain prompt, special tokens included."""
        self._need(Capability.TOKENIZE)
        return self.spell(text)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """As the server does for chat: the template makes text of them, and the text becomes ids."""
        self._need(Capability.TOKENIZE)
        tokenizer = self.dialect.tokenizer
        assert tokenizer is not None, "the capability was found by its routes"
        assert tokenizer.chat_route is not None, "the capability was found by its routes"
        answer = self._http.post(tokenizer.chat_route, {"messages": list(messages)})
        return self.spell(value_at(answer, tokenizer.chat_text, str, tokenizer.chat_route))

    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """The server labels what it read."""
        updating = self.dialect.updating
        assert updating is not None, "the capability was found by its route"
        body = {updating.directory: str(directory), updating.label: version.label, **updating.ask}
        if not value_at(self._http.post(updating.route, body), updating.done, bool, updating.route):
            raise EngineError(
                f"{updating.route} says that {directory} was not loaded; the cause is in its log"
            )

    def reset_cache(self) -> None:
        """Only an idle server can: with requests in flight it refuses."""
        self._need(Capability.RESET_CACHE)
        assert self.dialect.reset_cache is not None, "the capability was found by its route"
        reply = self._http.exchange("POST", self.dialect.reset_cache)
        if reply.status != 200:
            self._http.read(self.dialect.reset_cache, reply)

    def complete(self, request: Request) -> object:
        """The answer to one call, as it came."""
        body = request_body(request, self.model, self.dialect, self.kind)
        return self._http.post(self.dialect.completions, body)

    def complete_by_stream(self, request: Request) -> Joined:
        """As the dialect says that deltas are put together."""
        streaming = self.streaming
        assert streaming is not None, "the capability was found by it"
        route = streaming.route or self.dialect.completions
        return join(self.streamed(request, streaming), streaming, route)

    def streamed(self, request: Request, streaming: Streaming) -> Stream:
        """The answer to one call, as it came in deltas."""
        body = request_body(request, self.model, self.dialect, self.kind)
        for path, value in streaming.ask.items():
            put(body, path, value)
        return self._http.stream(streaming.route or self.dialect.completions, body)

    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raw logprobs of one sequence, but its first token."""
        scoring = self.dialect.scoring
        assert scoring is not None, "asked only where the dialect can"
        body = prompt_body(Prompt(token_ids), self.model, self.dialect)
        for path, value in scoring.ask.items():
            put(body, path, value)
        answer = self._http.post(self.dialect.completions, body)
        return read_scores(answer, token_ids, scoring, self.dialect.completions)

    def spell(self, text: str) -> tuple[int, ...]:
        """Ids that the server makes of plain text."""
        tokenizer = self.dialect.tokenizer
        assert tokenizer is not None, "asked only where the dialect can"
        answer = self._http.post(tokenizer.route, {tokenizer.text: text, **tokenizer.ask})
        return tuple(value_at(answer, tokenizer.token_ids, list[int], tokenizer.route))

    def _ask(self, requests: Sequence[Request], call: Callable[[Request], Joined]) -> list[Answer]:
        for request in requests:
            self._check(request)
        reader = Reader(self.dialect, self.kind, self._digest, self._version())
        calls = [one_by_one(request, self.dialect) for request in requests]
        answers = iter(self._http.each(call, [each for group in calls for each in group]))
        return [
            _read(reader, list(itertools.islice(answers, len(group))), request)
            for group, request in zip(calls, requests, strict=True)
        ]

    def _version(self) -> WeightVersion:
        updating = self.dialect.updating
        if updating is None or Capability.WEIGHT_VERSION not in self.capabilities:
            return UNKNOWN
        label = value_at(self._http.get(updating.shown_by), updating.shown, str, updating.shown_by)
        return WeightVersion(label) if label else UNKNOWN

    def _check(self, request: Request) -> None:
        """Also what this kind of server has no word for."""
        self._check_sampling(request.sampling)
        super()._check(request)
        if self.dialect.takes_text:
            self._check_text(request.prompt)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        dialect, defaults = self.dialect, SamplingParams()
        changed = {
            name
            for name in SamplingParams.__struct_fields__
            if getattr(sampling, name) != getattr(defaults, name)
        }
        for name in changed & dialect.cannot.keys():
            raise CapabilityMissing(f"{self.name} cannot {name} as it is meant here: {dialect.cannot[name]}")
        for name in changed & dialect.undone_by.keys():
            if dialect.undone_by[name] in changed:
                raise CapabilityMissing(
                    f"{self.name} forgets {name} where {dialect.undone_by[name]} is given"
                )
        if sampling.logprobs is None:
            raise InvalidSampling("logprobs is None, and without logprobs there is nothing to audit; use 0")
        if dialect.before_truncation and sampling.truncates and not untruncated(sampling).own_distribution:
            raise CapabilityMissing(
                f"{self.name} cannot report logprobs of truncated samples: its numbers are of the distribution "
                "before top_p and top_k, which beside a temperature, a bias or a penalty is neither the model's "
                "own nor the one sampled from; sample with top_p=1 and top_k=0"
            )
        if self._most_samples is not None and sampling.n > self._most_samples:
            raise CapabilityMissing(
                f"{self.name} draws {self._most_samples} samples at once here, and {sampling.n} were asked for; "
                f"{dialect.facts.more_samples}"
            )
        if sampling.seed is not None and not sampling.seed <= dialect.largest_seed - sampling.n + 1:
            raise InvalidSampling(
                f"seed is {sampling.seed}, and {self.name} takes at most {dialect.largest_seed}"
            )

    def _check_text(self, prompt: Prompt) -> None:
        """Its text becomes these ids, by the server's own account."""
        if prompt.text is None:
            raise CapabilityMissing(
                f"{self.name} takes text and no token ids, and a prompt of {len(prompt.token_ids)} ids has no text; "
                "give it texts alone: --prompts FILE --set validation.property_based_prompts=false"
            )
        if prompt.text not in self._spelled:
            self._spelled[prompt.text] = self.spell(prompt.text)
        seen = self._spelled[prompt.text]
        if seen != prompt.token_ids:
            raise InvalidPrompt(
                f"{self.name} takes text and no token ids, and makes {len(seen)} tokens of {prompt.text[:40]!r} where "
                f"{len(prompt.token_ids)} others were meant; leave this prompt out, or look for a BOS or a template"
            )


def _read(reader: Reader, answers: Sequence[Joined], request: Request) -> Answer:
    whole = reader.answer([each.answer for each in answers], request)
    return msgspec.structs.replace(whole, stream_deltas=sum(each.deltas for each in answers))
