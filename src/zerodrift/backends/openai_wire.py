"""From a request to a call in some dialect, and from its answer to completions that can be believed.

What is missing, null, out of order or of another kind is an error that names it by its path. A sample that cannot be
read is a `Problem` of its own; an answer that cannot be told apart into samples raises BadAnswer.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from zerodrift.backends.json_path import look_up, put
from zerodrift.backends.openai_dialects import Dialect, Numbers
from zerodrift.core.completion import (
    Answer,
    Completion,
    FinishReason,
    LogprobKind,
    Problem,
    TokenAlternative,
    check_logprobs,
)
from zerodrift.core.errors import BadAnswer, InvalidCompletion, NonFinite, ZerodriftError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

Shape = TypeVar("Shape")

ALWAYS_SENT = ("temperature", "max_tokens", "seed", "n")
"""What every trainer states; the rest is left to the server's defaults unless it was asked for."""
UNKNOWN = WeightVersion("unknown")
LOWEST = -1e38
"""Some servers write the lowest fp32 number for the logarithm of zero."""


def asked_kind(sampling: SamplingParams, kind: LogprobKind) -> LogprobKind:
    """What to ask for: after a greedy sampler the distribution is a point, and the model's own is what is meant."""
    return LogprobKind.RAW if sampling.greedy else kind


def request_body(request: Request, model: str, dialect: Dialect, kind: LogprobKind) -> dict[str, object]:
    """The JSON of one call.

    Parameters that keep their default stay out, as in most trainers, and the server fills them in from wherever it
    likes: that is a fault to be found.
    """
    sampling, defaults = request.sampling, SamplingParams()
    body: dict[str, object] = {"model": model, "prompt": request.prompt.token_ids, **dialect.always}
    for name in SamplingParams.__struct_fields__:
        value = getattr(sampling, name)
        if value is not None and (name in ALWAYS_SENT or value != getattr(defaults, name)):
            put(body, dialect.names.get(name, name), value)
    if sampling.logprobs is not None:
        count = max(sampling.logprobs, dialect.least_logprobs)
        put(body, dialect.names.get("logprobs", "logprobs"), count)
        for path, value in dialect.numbers[asked_kind(sampling, kind)].ask.items():
            put(body, path, value)
    return body


def value_at(document: object, path: str, shape: type[Shape], where: str) -> Shape:
    """The value at `path`, of the right kind, or BadAnswer."""
    value = look_up(document, path)
    if value is msgspec.UNSET:
        raise BadAnswer(f"{where} answered without {path!r}; is it the kind of server that --engine names?")
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{where} answered with a strange {path!r} ({error})") from error


def samples_of(answer: object, dialect: Dialect) -> list[Any]:
    """The samples, whatever is in them."""
    found = look_up(answer, dialect.samples)
    return found if isinstance(found, list) else [found]


class Reader(msgspec.Struct, frozen=True):
    """Reads answers to the calls of one backend."""

    dialect: Dialect
    kind: LogprobKind
    fingerprint: str

    def answer(self, answer: object, request: Request) -> Answer:
        """Every sample of one request, in order of its index."""
        expected = range(request.sampling.n)
        route = self.dialect.completions
        samples = samples_of(answer, self.dialect)
        by_index = {value_at(sample, self.dialect.index, int, route): sample for sample in samples}
        if len(samples) != len(expected) or set(by_index) != set(expected):
            raise BadAnswer(
                f"{route} was asked for {len(expected)} samples and answered with {len(samples)}, of the indices "
                f"{sorted(by_index)}; each must come once"
            )
        completions, problems = [], []
        for index in expected:
            try:
                completions.append(self._completion(by_index[index], index, request))
            except ZerodriftError as error:
                problems.append(Problem(error.code, f"sample {index}: {error}"))
        return Answer(tuple(completions), tuple(problems))

    def _completion(self, sample: object, index: int, request: Request) -> Completion:
        dialect, sampling = self.dialect, request.sampling
        kind = asked_kind(sampling, self.kind)
        token_ids = tuple(value_at(sample, dialect.token_ids, list[int], dialect.completions))
        cached = look_up(sample, dialect.cached_tokens)
        text = look_up(sample, dialect.text)
        return Completion(
            prompt_token_ids=self._prompt(sample, request.prompt),
            token_ids=token_ids,
            logprobs=self._logprobs(sample, token_ids, dialect.numbers[kind]),
            kind=kind,
            sampling=sampling,
            finish_reason=self._finish_reason(sample),
            versions=(VersionSpan(UNKNOWN, 0, len(token_ids)),) if token_ids else (),
            fingerprint=self.fingerprint,
            sample_index=index,
            top_logprobs=self._alternatives(sample, dialect.numbers[kind], sampling.logprobs or 0),
            cached_tokens=None if cached is msgspec.UNSET else cached,
            text=text if isinstance(text, str) else None,
        )

    def _prompt(self, sample: object, prompt: Prompt) -> tuple[int, ...]:
        """The ids that were sent, if the server saw as many: it does not show them."""
        seen = value_at(sample, self.dialect.prompt_tokens, int, self.dialect.completions)
        if seen != len(prompt.token_ids):
            raise InvalidCompletion(
                f"{len(prompt.token_ids)} prompt tokens were sent and the engine saw {seen} "
                f"({self.dialect.prompt_tokens}); it added or dropped some, a BOS perhaps"
            )
        return prompt.token_ids

    def _logprobs(self, sample: object, token_ids: tuple[int, ...], numbers: Numbers) -> tuple[float, ...]:
        owners = look_up(sample, numbers.owners)
        owners = [] if owners is msgspec.UNSET else owners
        if len(owners) < len(token_ids):
            raise InvalidCompletion(
                f"{len(token_ids)} tokens carry {len(owners)} logprobs ({numbers.owners}): {self.dialect.lost}"
            )
        if tuple(owners) != token_ids:
            raise InvalidCompletion(
                f"the engine sampled {_shorten(token_ids)} and reports logprobs of {_shorten(owners)} "
                f"({numbers.owners}); they belong to other tokens"
            )
        values = value_at(sample, numbers.values, list[float | None], self.dialect.completions)
        return tuple(_logprob(value, numbers) for value in values)

    def _alternatives(
        self, sample: object, numbers: Numbers, count: int
    ) -> tuple[tuple[TokenAlternative, ...], ...]:
        """The `count` likeliest tokens at each position; fewer where truncation left fewer."""
        if count == 0:
            return ()
        route = self.dialect.completions
        ids = value_at(sample, numbers.alternative_ids, list[list[int]], route)
        values = value_at(sample, numbers.alternative_values, list[list[float | None]], route)
        return tuple(_ranked(*pair, count, numbers) for pair in zip(ids, values, strict=True))

    def _finish_reason(self, sample: object) -> FinishReason:
        word = value_at(sample, self.dialect.finish, str, self.dialect.completions)
        if word not in self.dialect.finish_words:
            raise BadAnswer(
                f"the engine finished for the reason {word!r} ({self.dialect.finish}); we know "
                f"{', '.join(self.dialect.finish_words)}"
            )
        return self.dialect.finish_words[word]


def _ranked(
    ids: list[int], values: list[float | None], count: int, numbers: Numbers
) -> tuple[TokenAlternative, ...]:
    if len(ids) > count or len(set(ids)) < len(ids):
        raise InvalidCompletion(
            f"{count} alternatives were asked for and {_shorten(ids)} came ({numbers.alternative_ids})"
        )
    ranked = [
        TokenAlternative(token, _logprob(value, numbers)) for token, value in zip(ids, values, strict=True)
    ]
    check_logprobs(numbers.alternative_values, (each.logprob for each in ranked))
    if any(likelier.logprob < rarer.logprob for likelier, rarer in itertools.pairwise(ranked)):
        raise InvalidCompletion(f"alternatives are not in order of likelihood ({numbers.alternative_values})")
    return tuple(ranked)


def _logprob(value: float | None, numbers: Numbers) -> float:
    if value is None:
        raise NonFinite(
            f"{numbers.values} holds null, which is how JSON writers spell NaN; look for NaN in weights"
        )
    if not numbers.probabilities:
        if value <= LOWEST:
            raise NonFinite(f"{numbers.values} holds {value}, which stands for the logarithm of zero")
        return value
    if not 0 < value <= 1:
        raise NonFinite(
            f"{numbers.values} holds {value}, and a token that was drawn has a probability in (0, 1]"
        )
    return math.log(value)


def _shorten(ids: Sequence[int]) -> str:
    shown = str(list(ids))
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
