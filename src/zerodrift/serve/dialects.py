"""How each of the three routes writes an answer, and a delta of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from zerodrift.engine.output import Output
from zerodrift.serve import answers
from zerodrift.serve.answers import Json, Part, TokenNames
from zerodrift.serve.bridge import Ask, Piece


class Dialect(ABC):
    """One route's way."""

    prefix: ClassVar[str]
    """Of the ids of its requests."""
    kind: ClassVar[str] = ""
    delta_kind: ClassVar[str] = ""

    def __init__(self, names: TokenNames) -> None:
        self.names = names

    def answer(self, ask: Ask, outputs: Sequence[Output]) -> Json:
        """All samples."""
        choices = [self._choice(ask, index, output) for index, output in enumerate(outputs)]
        told = {"choices": choices, "usage": answers.usage(outputs, ask.asked.sampling.n)}
        return {**self._about(ask, self.kind), **told, **self._once(ask, outputs[0])}

    def deltas(self, ask: Ask, piece: Piece, *, first: bool) -> list[Json]:
        """Events for what one sample got; `first` of its own."""
        update = piece.update
        part = Part(update.token_ids, update.logprobs, update.top_logprobs, update.text)
        choice = {
            "index": piece.choice,
            **self._delta(ask, piece.choice, part, first=first),
            "finish_reason": None,
        }
        if ask.asked.returns_ids or self.always_ids:
            choice["token_ids"] = update.token_ids
        if update.output is not None:
            choice |= answers.ending(update.output)
        return [self.event(ask, [choice]) | self._first(ask, piece.choice, choice, first=first)]

    def event(self, ask: Ask, choices: list[Json], usage: Json | None = None) -> Json:
        """One event of a stream."""
        return {**self._about(ask, self.delta_kind), "choices": choices, "usage": usage}

    always_ids: ClassVar[bool] = False

    def _about(self, ask: Ask, kind: str) -> Json:
        named = {"object": kind} if kind else {}
        return {"id": ask.request_id, **named, "created": int(time.time()), "model": ask.asked.model.name}

    def _choice(self, ask: Ask, index: int, output: Output) -> Json:
        choice = {
            "index": index,
            **self._content(ask, index, answers.whole(output)),
            **answers.ending(output),
        }
        if ask.asked.returns_ids or self.always_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _once(self, ask: Ask, output: Output) -> Json:
        """What is said of the prompt beside the choices."""
        return {}

    def _first(self, ask: Ask, choice: int, written: Json, *, first: bool) -> Json:
        """What comes with the first delta of a sample: into `written`, or beside the choices."""
        return {}

    @abstractmethod
    def _content(self, ask: Ask, choice: int, part: Part) -> Json: ...

    def _delta(self, ask: Ask, choice: int, part: Part, *, first: bool) -> Json:
        return self._content(ask, choice, part)


class Completions(Dialect):
    """/v1/completions."""

    prefix, kind, delta_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, ask: Ask, index: int, output: Output) -> Json:
        choice = super()._choice(ask, index, output)
        choice["prompt_logprobs"] = answers.prompt_logprobs(output) if output.prompt_logprobs else None
        if ask.asked.returns_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _content(self, ask: Ask, choice: int, part: Part) -> Json:
        told = None
        if ask.asked.wants_logprobs:
            offset = ask.named.get(choice, 0)
            told = self.names.completion_logprobs(part, by_id=ask.asked.names_ids, offset=offset)
            ask.named[choice] = offset + sum(map(len, told["tokens"]))
        return {"text": part.text, "logprobs": told}

    def _first(self, ask: Ask, choice: int, written: Json, *, first: bool) -> Json:
        if first and ask.asked.returns_ids:
            written["prompt_token_ids"] = ask.prompts[choice // ask.asked.sampling.n].token_ids
        return {}


class ChatCompletions(Dialect):
    """/v1/chat/completions."""

    prefix, kind, delta_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, ask: Ask, choice: int, part: Part) -> Json:
        return {"message": {"role": "assistant", "content": part.text}, "logprobs": self._logprobs(ask, part)}

    def _delta(self, ask: Ask, choice: int, part: Part, *, first: bool) -> Json:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": part.text}, "logprobs": self._logprobs(ask, part)}

    def _logprobs(self, ask: Ask, part: Part) -> Json | None:
        if not ask.asked.wants_logprobs:
            return None
        return self.names.chat_logprobs(part, by_id=ask.asked.names_ids)

    def _once(self, ask: Ask, output: Output) -> Json:
        told = answers.prompt_logprobs(output) if output.prompt_logprobs else None
        ids = {"prompt_token_ids": output.prompt_token_ids} if ask.asked.returns_ids else {}
        return {"prompt_logprobs": told, **ids}

    def _first(self, ask: Ask, choice: int, written: Json, *, first: bool) -> Json:
        return {"prompt_token_ids": ask.prompts[0].token_ids} if first and ask.asked.returns_ids else {}


class GenerateDialect(Dialect):
    """/inference/v1/generate."""

    prefix = "gen"
    always_ids = True

    def _about(self, ask: Ask, kind: str) -> Json:
        # A client that gave an id gets that one back.
        return {**super()._about(ask, kind), "request_id": ask.asked.request_id or ask.request_id}

    def _content(self, ask: Ask, choice: int, part: Part) -> Json:
        told = None
        if ask.asked.wants_logprobs:
            told = self.names.chat_logprobs(part, by_id=True, with_ids=True)
        text = {"text": part.text} if ask.asked.with_text else {}
        return {"logprobs": told, "routed_experts": None, **text}

    def _once(self, ask: Ask, output: Output) -> Json:
        told = answers.prompt_logprobs(output) if output.prompt_logprobs else None
        return {"prompt_logprobs": told, "prompt_token_ids": output.prompt_token_ids}

    def _first(self, ask: Ask, choice: int, written: Json, *, first: bool) -> Json:
        return {"prompt_token_ids": ask.prompts[0].token_ids} if first else {}
