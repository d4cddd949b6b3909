"""What came out of the engine, as the three routes write it: OpenAI's two and vLLM's own.

Where vLLM's clients read a field that OpenAI does not have (token_ids, prompt_token_ids, weight_versions), it has vLLM's
name. A token of /inference/v1/generate is called both `token` and `token_id`: 0.31 wrote the one and 0.32 the other, and
clients of each are in use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerodrift.core.completion import TokenAlternative
from zerodrift.core.version import LineageSegment, VersionSpan
from zerodrift.engine.output import Output

PREFIX = "token_id:"
Json = dict[str, Any]


class Part(NamedTuple):
    """Some tokens of one sample: those of one delta, or all."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Sequence[TokenAlternative]]
    text: str


def whole(output: Output) -> Part:
    """All of it."""
    return Part(output.token_ids, output.logprobs, output.top_logprobs, output.text or "")


class TokenNames:
    """What tokens are called: by their ids, or by their text."""

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        """`decode` None: there is no text."""
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token: int, *, by_id: bool) -> str:
        """Of one token."""
        if by_id or self._decode is None:
            return f"{PREFIX}{token}"
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def completion_logprobs(self, part: Part, *, by_id: bool, offset: int) -> Json:
        """As /v1/completions has them: the sampled token stands among its alternatives, asked for or not.

        `offset`: characters of the tokens before these.
        """
        names = [self(token, by_id=by_id) for token in part.token_ids]
        tops, offsets = [], []
        for place, (name, logprob) in enumerate(zip(names, part.logprobs, strict=True)):
            alternatives = part.top_logprobs[place] if part.top_logprobs else ()
            entry = {self(each.token_id, by_id=by_id): each.logprob for each in alternatives}
            # Last, so that of two tokens with one text it is the sampled one that is told.
            tops.append({**entry, name: logprob})
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": part.logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def chat_logprobs(self, part: Part, *, by_id: bool, with_ids: bool = False) -> Json:
        """As /v1/chat/completions has them; `with_ids` as /inference/v1/generate does."""
        content = []
        for place, (token, logprob) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
            alternatives = part.top_logprobs[place] if part.top_logprobs else ()
            pairs = [(each.token_id, each.logprob) for each in alternatives]
            if with_ids and pairs:
                # vLLM puts the sampled token first and cuts the list behind as many as were asked for.
                pairs = [(token, logprob), *(pair for pair in pairs if pair[0] != token)][: len(pairs)]
            tops = [self._entry(*pair, by_id=by_id, with_ids=with_ids) for pair in pairs]
            entry = self._entry(token, logprob, by_id=by_id, with_ids=with_ids)
            content.append({**entry, "top_logprobs": tops})
        return {"content": content}

    def _entry(self, token: int, logprob: float, *, by_id: bool, with_ids: bool) -> Json:
        name = self(token, by_id=by_id)
        if with_ids:
            return {"token": f"{PREFIX}{token}", "token_id": token, "logprob": logprob}
        return {"token": name, "logprob": logprob, "bytes": None if by_id else list(name.encode())}


def prompt_logprobs(output: Output) -> list[dict[str, Json] | None]:
    """As vLLM writes them: by id, the token's own among the likeliest. `rank` of one beyond those is one more than they are."""
    scored: list[dict[str, Json] | None] = [None]
    tops = output.prompt_top_logprobs
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    for place, (token, logprob) in enumerate(pairs, start=1):
        alternatives = tops[place] if tops else ()
        entry = {
            str(each.token_id): {"logprob": each.logprob, "rank": rank, "decoded_token": None}
            for rank, each in enumerate(alternatives, start=1)
        }
        beyond = len(alternatives) + 1 if alternatives else None
        entry.setdefault(str(token), {"logprob": logprob, "rank": beyond, "decoded_token": None})
        scored.append(entry)
    return scored


def versions(spans: Sequence[VersionSpan | LineageSegment]) -> list[Json]:
    """Which weights made which tokens: vLLM's fields, and the digest that makes a label true."""
    return [
        {"version": span.version.label, "start": span.start, "end": span.end, "digest": span.version.digest}
        for span in spans
    ]


def adapter(output: Output) -> Json | None:
    """Which one was beside the weights, by the digest of base, A, B and scale."""
    return None if output.lora is None else {"name": output.lora.name, "digest": output.lora.digest}


def usage(outputs: Sequence[Output], per_prompt: int) -> Json:
    """Prompts are counted once, however many samples they have."""
    prompts = outputs[::per_prompt]
    prompt, made = (
        sum(len(each.prompt_token_ids) for each in prompts),
        sum(len(each.token_ids) for each in outputs),
    )
    cached = sum(each.cached_tokens or 0 for each in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stop_reason(output: Output) -> int | None:
    """The stop token that was asked for and ended it; None where the model's own, a stop string or the length did."""
    last = output.token_ids[-1] if output.token_ids else None
    return last if output.finish_reason == "stop" and last in output.sampling.stop_token_ids else None


def ending(output: Output) -> Mapping[str, Any]:
    """What is said once a sample has ended."""
    return {
        "finish_reason": output.finish_reason.value,
        "stop_reason": stop_reason(output),
        "weight_versions": versions(output.versions),
        "adapter": adapter(output),
        "seed": output.sampling.seed,
    }
