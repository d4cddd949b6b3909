"""From a request to a call in some dialect, and from its answer to completions that can be believed.

What is missing, null, out of order or of another kind is an error that names it by its path. A sample that cannot be
read is a `Problem` of its own; an answer that cannot be told apart into samples raises BadAnswer.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from zerodrift.backends.dialects.facts import Dialect, Numbers, Scoring
from zerodrift.backends.json_path import look_up, put
from zerodrift.backends.server import UNKNOWN, bind_samples, shorten
from zerodrift.core.completion import (
    Answer,
    Completion,
    FinishReason,
    LogprobKind,
    TokenAlternative,
    check_logprobs,
)
from zerodrift.core.errors import BadAnswer, InvalidCompletion, NonFinite
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

Shape = TypeVar("Shape")

ALWAYS_SENT = ("temperature", "max_tokens", "seed", "n")
"""What every trainer states; the rest is left to the server's defaults unless it was asked for."""
LOWEST = -1e38
"""Some servers write the lowest fp32 number for the logarithm of zero."""


def asked_kind(sampling: SamplingParams, dialect: Dialect, kind: LogprobKind) -> LogprobKind:
    """What to ask for: after a greedy sampler the distribution is a point, and the model's own is what is meant."""
    return LogprobKind.RAW if sampling.greedy and LogprobKind.RAW in dialect.numbers else kind


def told_kind(sampling: SamplingParams, dialect: Dialect, kind: LogprobKind) -> LogprobKind:
    """What comes back: processed numbers that leave truncation out are, under truncation, the model's own."""
    asked = asked_kind(sampling, dialect, kind)
    left_out = dialect.before_truncation and sampling.truncates
    return LogprobKind.RAW if left_out and untruncated(sampling).own_distribution else asked


def untruncated(sampling: SamplingParams) -> SamplingParams:
    """The same, with every token kept."""
    return msgspec.structs.replace(sampling, top_p=1.0, top_k=0, min_p=0.0)


def request_body(request: Request, model: str, dialect: Dialect, kind: LogprobKind) -> dict[str, object]:
    """The JSON of one call.

    Parameters that keep their default stay out, as in most trainers, and the server fills them in from wherever it
    likes: that is a fault to be found.
    """
    sampling, defaults = request.sampling, SamplingParams()
    body = prompt_body(request.prompt, model, dialect)
    fields = dict(dialect.always)
    for name in SamplingParams.__struct_fields__:
        value = getattr(sampling, name)
        if value is not None and (name in ALWAYS_SENT or value != getattr(defaults, name)):
            fields[dialect.names.get(name, name)] = value
    if dialect.samples_apart:
        del fields[dialect.names.get("n", "n")]
    if sampling.greedy and dialect.greedy:
        del fields[dialect.names.get("temperature", "temperature")]
        fields |= dialect.greedy
    if sampling.logprobs is not None:
        if count := max(sampling.logprobs, dialect.least_logprobs):
            fields[dialect.names.get("logprobs", "logprobs")] = count
        fields |= dialect.numbers[asked_kind(sampling, dialect, kind)].ask
    for path, value in fields.items():
        put(body, path, value)
    return body


def prompt_body(prompt: Prompt, model: str, dialect: Dialect) -> dict[str, object]:
    """The part of a call that says what is asked, and not how."""
    body: dict[str, object] = {}
    put(body, dialect.prompt, prompt.text if dialect.takes_text else prompt.token_ids)
    if dialect.model is not None:
        put(body, dialect.model, model)
    if prompt.cache_salt is not None and dialect.salt is not None:
        put(body, dialect.salt, prompt.cache_salt)
    return body


def one_by_one(request: Request, dialect: Dialect) -> list[Request]:
    """The calls that a request becomes: one, or one for each sample with the seeds that follow each other."""
    sampling = request.sampling
    if not dialect.samples_apart:
        return [request]
    seeds = [None if sampling.seed is None else sampling.seed + index for index in range(sampling.n)]
    return [Request(request.prompt, msgspec.structs.replace(sampling, n=1, seed=seed)) for seed in seeds]


def value_at(document: object, path: str, shape: type[Shape], where: str) -> Shape:
    """The value at `path`, of the right kind, or BadAnswer."""
    value = look_up(document, path)
    if value is msgspec.UNSET:
        raise BadAnswer(f"{where} answered without {path!r}; is it the kind of server that --engine names?")
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"{where} answered with a strange {path!r} ({error})") from error


class ServerSample(NamedTuple):
    """One sample, and the answer that it came in."""

    own: object
    answer: object

    def look_up(self, path: str | None) -> Any:
        """The value at `path`, in the answer where that begins with a slash; UNSET where there is none."""
        if path is None:
            return msgspec.UNSET
        return look_up(self.answer, path[1:]) if path.startswith("/") else look_up(self.own, path)

    def value_at(self, path: str, shape: type[Shape], where: str) -> Shape:
        """The value at `path`, of the right kind, or BadAnswer."""
        return value_at(self.answer if path.startswith("/") else self.own, path.lstrip("/"), shape, where)


def samples_of(answer: object, dialect: Dialect) -> list[ServerSample]:
    """The samples, whatever is in them."""
    found = look_up(answer, dialect.samples)
    return [ServerSample(own, answer) for own in (found if isinstance(found, list) else [found])]


def read_scores(answer: object, token_ids: Sequence[int], scoring: Scoring, where: str) -> list[float]:
    """Raw logprobs of tokens 1… of the sequence that was sent."""
    owners = value_at(answer, scoring.owners, list[int], where)
    alike = len(owners) == len(token_ids) and all(
        told in (sent, scoring.nameless) for told, sent in zip(owners, token_ids, strict=True)
    )
    if not alike:
        raise BadAnswer(
            f"{where} was sent {shorten(token_ids)} and scored {shorten(owners)} ({scoring.owners})"
        )
    values = value_at(answer, scoring.values, list[float | None], where)
    if len(values) != len(token_ids):
        raise BadAnswer(
            f"{where} was sent {len(token_ids)} tokens and scored {len(values)} ({scoring.values})"
        )
    scores = [_logprob(value, Numbers(owners=scoring.owners, values=scoring.values)) for value in values[1:]]
    check_logprobs(scoring.values, scores)
    return scores


class Reader(msgspec.Struct, frozen=True):
    """Reads answers to the calls of one backend."""

    dialect: Dialect
    kind: LogprobKind
    fingerprint: str
    version: WeightVersion
    """What the server said it had before the calls."""

    def answer(self, answers: Sequence[object], request: Request) -> Answer:
        """Every sample of one request, in order of its index; `answers` are those of the calls that it became."""
        route = self.dialect.completions
        samples = [sample for answer in answers for sample in samples_of(answer, self.dialect)]
        numbers = (
            range(len(samples))
            if self.dialect.samples_apart
            else [sample.value_at(self.dialect.index, int, route) for sample in samples]
        )
        numbered = list(zip(numbers, samples, strict=True))
        return bind_samples(
            numbered, request, route, lambda sample, index: self._completion(sample, index, request)
        )

    def _completion(self, sample: ServerSample, index: int, request: Request) -> Completion:
        dialect, sampling = self.dialect, request.sampling
        numbers = dialect.numbers[asked_kind(sampling, dialect, self.kind)]
        token_ids = tuple(sample.value_at(dialect.token_ids, list[int], dialect.completions))
        self._check_count(sample, len(token_ids))
        cached = sample.look_up(dialect.cached_tokens)
        text = sample.look_up(dialect.text)
        return Completion(
            prompt_token_ids=self._prompt(sample, request.prompt),
            token_ids=token_ids,
            logprobs=self._logprobs(sample, token_ids, numbers),
            kind=told_kind(sampling, dialect, self.kind),
            sampling=sampling,
            finish_reason=self._finish_reason(sample),
            versions=(VersionSpan(self._version(sample), 0, len(token_ids)),) if token_ids else (),
            fingerprint=self.fingerprint,
            sample_index=index,
            top_logprobs=self._alternatives(sample, numbers, sampling.logprobs or 0),
            cached_tokens=None if cached is msgspec.UNSET else cached,
            text=text if isinstance(text, str) else None,
        )

    def _version(self, sample: ServerSample) -> WeightVersion:
        """A label that moved while we waited belongs to some of the tokens, and nobody can say to which."""
        updating = self.dialect.updating
        told = None if updating is None else sample.look_up(updating.sampled)
        return self.version if told == self.version.label else UNKNOWN

    def _check_count(self, sample: ServerSample, came: int) -> None:
        """Ids that are left out between others leave no gap. A server that writes null does not say how many it made."""
        path = self.dialect.output_tokens
        if path is None or sample.look_up(path) in (msgspec.UNSET, None):
            return
        made = sample.value_at(path, int, self.dialect.completions)
        if made != came:
            raise InvalidCompletion(
                f"the engine made {made} tokens ({path}) and sent {came}: {self.dialect.lost}"
            )

    def _prompt(self, sample: ServerSample, prompt: Prompt) -> tuple[int, ...]:
        """The ids that were sent, if the server saw as many: it does not show them."""
        if self.dialect.prompt_tokens is None:
            return prompt.token_ids
        seen = sample.value_at(self.dialect.prompt_tokens, int, self.dialect.completions)
        if seen != len(prompt.token_ids):
            raise InvalidCompletion(
                f"{len(prompt.token_ids)} prompt tokens were sent and the engine saw {seen} "
                f"({self.dialect.prompt_tokens}); it added or dropped some, a BOS perhaps"
            )
        return prompt.token_ids

    def _logprobs(
        self, sample: ServerSample, token_ids: tuple[int, ...], numbers: Numbers
    ) -> tuple[float, ...]:
        told = numbers.values if numbers.owners is None else numbers.owners
        owners: list[Any] = []
        if sample.look_up(told) not in (msgspec.UNSET, None):
            owners = sample.value_at(told, list[Any], self.dialect.completions)
        if len(owners) < len(token_ids):
            raise InvalidCompletion(
                f"{len(token_ids)} tokens carry {len(owners)} logprobs ({told}): {self.dialect.lost}"
            )
        if numbers.owners is not None and tuple(owners) != token_ids:
            raise InvalidCompletion(
                f"the engine sampled {shorten(token_ids)} and reports logprobs of {shorten(owners)} "
                f"({numbers.owners}); they belong to other tokens"
            )
        values = sample.value_at(numbers.values, list[float | None], self.dialect.completions)
        return tuple(_logprob(value, numbers) for value in values)

    def _alternatives(
        self, sample: ServerSample, numbers: Numbers, count: int
    ) -> tuple[tuple[TokenAlternative, ...], ...]:
        """The `count` likeliest tokens at each position; fewer where truncation left fewer."""
        if count == 0 or numbers.alternative_ids is None:
            return ()
        route = self.dialect.completions
        ids = sample.value_at(numbers.alternative_ids, list[list[int]], route)
        values = sample.value_at(numbers.alternative_values, list[list[float | None]], route)
        if [len(each) for each in ids] != [len(each) for each in values]:
            raise InvalidCompletion(
                f"alternatives and their values differ in number ({numbers.alternative_ids} and "
                f"{numbers.alternative_values}); nobody can say which belong together"
            )
        return tuple(_ranked(*pair, count, numbers) for pair in zip(ids, values, strict=True))

    def _finish_reason(self, sample: ServerSample) -> FinishReason:
        word = sample.value_at(self.dialect.finish, str, self.dialect.completions)
        if word not in self.dialect.finish_words:
            raise BadAnswer(
                f"the engine finished for the reason {word!r} ({self.dialect.finish}); we know "
                f"{', '.join(self.dialect.finish_words)}"
            )
        return self.dialect.finish_words[word]


def _ranked(
    ids: list[int], values: list[float | None], count: int, numbers: Numbers
) -> tuple[TokenAlternative, ...]:
    # Some servers give all of several tokens that tie for the last place.
    tied = len(ids) > count and set(values[count:]) == {values[count - 1]}
    if (len(ids) > count and not tied) or len(set(ids)) < len(ids):
        raise InvalidCompletion(
            f"{count} alternatives were asked for and {shorten(ids)} came ({numbers.alternative_ids})"
        )
    ranked = [
        TokenAlternative(token, _logprob(value, numbers)) for token, value in zip(ids, values, strict=True)
    ][:count]
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
