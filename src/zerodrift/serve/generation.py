"""Routes that generate and score: from a body to the engine and back, whole or as a stream."""

import inspect
from collections.abc import AsyncIterator, Sequence
from typing import Any

from zerodrift.core.errors import InvalidPrompt, ZerodriftError
from zerodrift.engine.output import Output
from zerodrift.serve import answers, asked, wire
from zerodrift.serve.adapters import ServedAdapters
from zerodrift.serve.asked import AskedModel, AskedSamples
from zerodrift.serve.bridge import Ask, Bridge
from zerodrift.serve.call import DONE, Call, CallReply, EventStream, event
from zerodrift.serve.dialects import ChatCompletions, Completions, Dialect, GenerateDialect
from zerodrift.serve.errors import CallRefused, refusal_of
from zerodrift.serve.figures import Figures
from zerodrift.serve.settings import ServeSettings


class Generation:
    """Answers for one model."""

    def __init__(
        self, bridge: Bridge, adapters: ServedAdapters, settings: ServeSettings, figures: Figures
    ) -> None:
        self._bridge, self._adapters, self._figures = bridge, adapters, figures
        self._model, self._limits = settings.model, settings.limits
        tokenizer = bridge.engine_loop.engine.tokenizer
        names = answers.TokenNames(None if tokenizer is None else tokenizer.decode)
        self._completions = Completions(names)
        self._chat = ChatCompletions(names)
        self._generate = GenerateDialect(names)

    async def completions(self, call: Call) -> CallReply | EventStream:
        """/v1/completions."""
        model = self._asked_for(call.body.model)
        return await self._answer(
            call, asked.of_completion(call.body, model, self._limits), self._completions
        )

    async def chat(self, call: Call) -> CallReply | EventStream:
        """/v1/chat/completions."""
        body: wire.Chat = call.body
        model = self._asked_for(body.model)
        ids = await self._bridge.off_loop(self._render, body, size=_characters(body))
        return await self._answer(call, asked.of_chat(body, ids, model, self._limits), self._chat)

    async def generate(self, call: Call) -> CallReply | EventStream:
        """/inference/v1/generate."""
        model = self._asked_for(call.body.model)
        return await self._answer(call, asked.of_generate(call.body, model, self._limits), self._generate)

    async def token_logprobs(self, call: Call) -> CallReply:
        """/v1/token_logprobs: raw, at temperature 1, from one forward over the whole sequence."""
        model = self._asked_for(call.body.model)
        ask, outputs = await self._served(call, asked.of_score(call.body, model, self._limits), "score")
        return CallReply(await self._bridge.off_loop(_encoded_scores, ask, outputs, size=_numbers(outputs)))

    async def tokenize(self, call: Call) -> CallReply:
        """/tokenize."""
        body: wire.Tokenize = call.body
        self._asked_for(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise CallRefused(400, "send prompt or messages, one of the two", param="prompt")
        ids = await self._bridge.off_loop(self._tokens, body, size=_characters(body))
        context = self._bridge.engine_loop.engine.facts.max_model_len
        return CallReply({"tokens": ids, "count": len(ids), "max_model_len": context})

    def _asked_for(self, name: str | None) -> AskedModel:
        """The model itself, or an adapter that is loaded under this name."""
        if name in (None, self._model):
            return AskedModel(self._model, None)
        names = [each.name for each in self._adapters.versions]
        if name not in names:
            raise CallRefused(
                404,
                f"the model {name[:80]!r} is not served; {', '.join(map(repr, [self._model, *names]))[:400]} is",
                code="model/not-found",
                param="model",
            )
        return AskedModel(name, name)

    async def _answer(self, call: Call, wanted: AskedSamples, dialect: Dialect) -> CallReply | EventStream:
        if not wanted.streams:
            ask, outputs = await self._served(call, wanted, dialect.prefix)
            encoded = await self._bridge.off_loop(_encoded, dialect, ask, outputs, size=_numbers(outputs))
            return CallReply(encoded)
        ask = await self._bridge.submit(wanted, dialect.prefix)
        call.let_go()
        return EventStream(self._streamed(ask, dialect))

    async def _served(self, call: Call, wanted: AskedSamples, prefix: str) -> tuple[Ask, list[Output]]:
        ask = await self._bridge.submit(wanted, prefix)
        call.let_go()
        try:
            outputs = await ask.result()
        finally:
            self._bridge.done(ask)
        self._figures.served(ask)
        require_whole(outputs)
        return ask, outputs

    async def _streamed(self, ask: Ask, dialect: Dialect) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            async for pieces in ask.pieces():
                written = []
                for piece in pieces:
                    if piece.update.output is not None:
                        require_whole([piece.update.output])
                    first = piece.choice not in begun
                    begun.add(piece.choice)
                    written += [event(each) for each in dialect.deltas(ask, piece, first=first)]
                if written:
                    yield b"".join(written)
            self._figures.served(ask)
            if ask.asked.usage_in_stream:
                outputs = [ask.outputs[choice] for choice in sorted(ask.outputs)]
                yield event(dialect.event(ask, [], answers.usage(outputs, ask.asked.sampling.n)))
            yield DONE
        except (ZerodriftError, CallRefused) as error:
            # The status is out already; a client reads what happened where it would have read tokens.
            yield b"data: " + refusal_of(error, ask.request_id).body + b"\n\n" + DONE
        finally:
            self._bridge.done(ask)

    def _tokens(self, body: wire.Tokenize) -> list[int]:
        if body.messages is not None:
            return self._render(body)
        tokenizer = self._tokenizer()
        try:
            return list(tokenizer(body.prompt)["input_ids"])
        except Exception as error:  # whatever a vendor raises
            raise InvalidPrompt("the tokenizer cannot read this text; send ids") from error

    def _render(self, body: wire.Chat | wire.Tokenize) -> list[int]:
        """By the model's own template, which was read when it was loaded; a request brings values, never a template."""
        tokenizer = self._tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidPrompt("this model has no chat template; send token ids to /v1/completions")
        messages = body.messages or []
        if len(messages) > self._limits.messages:
            raise CallRefused(
                400, f"{len(messages)} messages; this server allows {self._limits.messages}", param="messages"
            )
        given = body.chat_template_kwargs or {}
        if taken := given.keys() & _template_parameters(tokenizer):
            raise CallRefused(
                400,
                f"chat_template_kwargs may not set {min(taken)!r}, which is the server's",
                param="chat_template_kwargs",
            )
        try:
            found = tokenizer.apply_chat_template(
                [message.as_template_sees_it for message in messages],
                add_generation_prompt=body.add_generation_prompt is not False,
                tokenize=True,
                return_dict=False,
                **given,
            )
        except Exception as error:  # whatever a template raises of these messages
            raise CallRefused(
                400,
                "the model's chat template cannot render these messages; see what roles it takes",
                param="messages",
            ) from error
        return list(found)

    def _tokenizer(self) -> Any:
        tokenizer = self._bridge.engine_loop.engine.tokenizer
        if tokenizer is None:
            raise InvalidPrompt("this model has no tokenizer; send token ids to /v1/completions")
        return tokenizer


def require_whole(outputs: Sequence[Output]) -> None:
    """A sample that has no numbers to show fails its call, and nobody else's."""
    for output in outputs:
        if output.problem is not None:
            raise CallRefused(422, output.problem.message, code=output.problem.code)


def _characters(body: wire.Chat | wire.Tokenize) -> int:
    """To be tokenized."""
    parts = [message.as_template_sees_it["content"] for message in body.messages or []]
    return sum(map(len, parts)) + len(getattr(body, "prompt", None) or "")


def _numbers(outputs: Sequence[Output]) -> int:
    """To be written."""
    return sum(
        len(each.token_ids) * (1 + (each.sampling.logprobs or 0))
        + len(each.prompt_token_ids) * (1 + (each.sampling.prompt_logprobs or 0))
        for each in outputs
    )


def _encoded(dialect: Dialect, ask: Ask, outputs: Sequence[Output]) -> bytes:
    return CallReply(dialect.answer(ask, outputs)).encoded


def _encoded_scores(ask: Ask, outputs: Sequence[Output]) -> bytes:
    data = [
        {
            "index": index,
            "token_ids": output.prompt_token_ids,
            "logprobs": output.prompt_logprobs,
            "top_logprobs": [
                [{"token_id": each.token_id, "logprob": each.logprob} for each in tops]
                for tops in output.prompt_top_logprobs
            ],
            "weight_versions": answers.versions(output.lineage),
            "adapter": answers.adapter(output),
        }
        for index, output in enumerate(outputs)
    ]
    told = {"id": ask.request_id, "object": "list", "model": ask.asked.model.name, "data": data}
    return CallReply(told).encoded


def _template_parameters(tokenizer: Any) -> set[str]:
    return {*inspect.signature(tokenizer.apply_chat_template).parameters}
