"""The two routes by which vLLM generates from ids: how each is asked, and what it answers in the words of the first.

`/v1/completions` is OpenAI's. `/inference/v1/generate` takes vLLM's own sampling parameters, so that
generation_config.json has nothing to fill in but max_tokens, which we always send; its answers carry ids as numbers,
and the versions of the weights that made each token, by the server's own account.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends.http import Reply
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.backends.vllm_wire import PREFIX, AnyChoice, Choice, Logprobs, Usage, parse, token_id
from zerodrift.core.errors import EngineRefused
from zerodrift.core.request import Request, SamplingParams

ALWAYS_SENT = ("temperature", "max_tokens", "seed", "n", "logprobs")
"""What every trainer states; the rest is left to the server's defaults unless it was asked for."""

NAN_REFUSAL = "Out of range float values are not JSON compliant"
"""vLLM's answer to its own NaN: it fails to write the number, and blames the request for it with a 400."""

FLAG = "--enable-scale-out"
"""Without it releases from 0.30 on answer 403 to /inference; those before have the route, and do not know the flag."""

# Without usage, nothing would say what came from the prefix cache.
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Route(NamedTuple):
    """How to ask, and what makes its answers those of /v1/completions."""

    path: str
    body: Callable[[tuple[int, ...], str, Mapping[str, Any]], dict[str, object]]
    """Of a prompt, a model's name and sampling parameters."""
    streaming: Streaming
    """Differences, of as many tokens as --stream-interval says; ids of the prompt come with the first."""
    spread: Callable[[object, tuple[int, ...]], object]
    """What is said of the prompt once, said with every sample."""
    choice: Callable[[Mapping[str, Any]], Choice]
    closed: frozenset[int] = frozenset()
    """Statuses that mean that the route is switched off."""
    more_alternatives: int = 0
    """To ask for beyond those that are wanted."""
    must_read: tuple[str, ...] = ()
    """Flags without which alternatives have no ids."""

    def request_body(self, request: Request, model: str, *, explicit: bool) -> dict[str, object]:
        """The JSON of one call.

        `explicit` sends every sampling parameter. Without it those that keep their default stay out, as in most
        trainers, and the server fills them in from wherever it likes: that is the fault to be found.
        """
        defaults = SamplingParams()
        found = {name: getattr(request.sampling, name) for name in SamplingParams.__struct_fields__}
        sampling = {
            name: value
            for name, value in found.items()
            if value is not None and (explicit or name in ALWAYS_SENT or value != getattr(defaults, name))
        }
        if request.sampling.logprobs:
            sampling["logprobs"] += self.more_alternatives
        body = self.body(request.prompt.token_ids, model, sampling)
        if request.prompt.cache_salt is not None:
            body["cache_salt"] = request.prompt.cache_salt
        return body

    def score_body(self, token_ids: tuple[int, ...], model: str) -> dict[str, object]:
        """A call that scores its own prompt. vLLM cannot generate nothing, so one greedy token is thrown away."""
        return self.body(token_ids, model, {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})

    def probe_body(self, model: str, extra: Mapping[str, object]) -> dict[str, object]:
        """The smallest call, with what is to be found out where it belongs."""
        inner = {name: value for name, value in extra.items() if name in SamplingParams.__struct_fields__}
        body = self.body((0, 0), model, {"max_tokens": 1, "temperature": 0, **inner})
        return body | {name: value for name, value in extra.items() if name not in inner}

    def check_open(self, address: str, reply: Reply) -> None:
        """The server lets us ask by this route."""
        if reply.status in self.closed:
            raise EngineRefused(
                f"{address}{self.path} is not open (it answered {reply.status}): start the server with {FLAG}, "
                "or leave engine.route at completions"
            )


def is_nan(reply: Reply) -> bool:
    """The server computed NaN, and could not write it."""
    return reply.status == 400 and NAN_REFUSAL.encode() in reply.body


def _completions_body(
    token_ids: tuple[int, ...], model: str, sampling: Mapping[str, Any]
) -> dict[str, object]:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": token_ids, **ids, **sampling}


_COMPLETIONS = "/v1/completions"
COMPLETIONS = Route(
    path=_COMPLETIONS,
    body=_completions_body,
    streaming=Streaming(
        ask=_STREAMED,
        samples="choices",
        index="index",
        lists={
            name: name
            for name in ("token_ids", "logprobs/tokens", "logprobs/token_logprobs", "logprobs/top_logprobs")
        },
        text="text",
        finish="finish_reason",
    ),
    spread=lambda answer, _: answer,
    choice=lambda raw: parse(raw, Choice, _COMPLETIONS),
    must_read=("return_tokens_as_token_ids",),
)


class _Alternative(msgspec.Struct):
    logprob: float | None
    token_id: int | None = None
    token: str | None = None
    """`token_id:5`: how 0.28 writes ids."""

    @property
    def name(self) -> str:
        return f"{PREFIX}{token_id(self.token or '') if self.token_id is None else self.token_id}"


class _Entry(_Alternative):
    top_logprobs: list[_Alternative] = []


class _Content(msgspec.Struct):
    content: list[_Entry]


class _Generated(AnyChoice):
    logprobs: _Content | None = None


class _Response(msgspec.Struct):
    choices: list[dict[str, Any]]
    usage: Usage | None = None
    prompt_token_ids: Any = None
    prompt_logprobs: Any = None


def _generate_body(token_ids: tuple[int, ...], model: str, sampling: Mapping[str, Any]) -> dict[str, object]:
    return {"model": model, "token_ids": token_ids, "return_token_ids": True, "sampling_params": sampling}


def _spread(answer: object, sent: tuple[int, ...]) -> dict[str, object]:
    """0.28 does not repeat the prompt; where it counted as many tokens as were sent, those are taken."""
    response = parse(answer, _Response, _GENERATE)
    ids, usage = response.prompt_token_ids, response.usage
    if ids is None and usage is not None and usage.prompt_tokens == len(sent):
        ids = list(sent)
    about = {"prompt_token_ids": ids, "prompt_logprobs": response.prompt_logprobs}
    return {"choices": [choice | about for choice in response.choices], "usage": msgspec.to_builtins(usage)}


def _choice(raw: Mapping[str, Any]) -> Choice:
    told = parse(raw, _Generated, _GENERATE)
    logprobs = None
    if told.logprobs is not None:
        entries = told.logprobs.content
        logprobs = Logprobs(
            token_logprobs=[entry.logprob for entry in entries],
            tokens=[entry.name for entry in entries],
            top_logprobs=[{each.name: each.logprob for each in entry.top_logprobs} for entry in entries],
        )
    return Choice(**msgspec.structs.asdict(told) | {"logprobs": logprobs})


_GENERATE = "/inference/v1/generate"
GENERATE = Route(
    path=_GENERATE,
    body=_generate_body,
    # Versions come with the last delta, and logprobs of the prompt with none.
    streaming=Streaming(
        ask=_STREAMED,
        samples="choices",
        index="index",
        lists={name: name for name in ("token_ids", "logprobs/content")},
        finish="finish_reason",
    ),
    spread=_spread,
    choice=_choice,
    closed=frozenset({403, 404}),
    # The list is cut behind as many entries as were asked for, and the sampled token is the first of them: where it is
    # not among the likeliest, the last of those is lost.
    more_alternatives=1,
)

ROUTES: Mapping[str, Route] = {"completions": COMPLETIONS, "generate": GENERATE}
"""By their names in `engine.route`."""
