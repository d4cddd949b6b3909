"""One sample on its way from prompt to completion: where it stands, what is written, what was drawn.

    WAITING ⇄ RUNNING → FINISHED, and WAITING → FINISHED where it is aborted before its turn

Positions [0, computed) have KV, positions up to `length` are known tokens; a sample whose `remaining` is one decodes,
one with more prefills, and nothing else tells the two apart. Preemption forgets KV, never tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from zerodrift.core.completion import FinishReason, Problem
from zerodrift.core.errors import InvariantBroken
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import AdapterVersion, LineagePass, LineageSegment, VersionSpan, WeightVersion
from zerodrift.engine.plan import Drawn, Scored


class Phase(StrEnum):
    """Where a sample stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_MOVES = {
    Phase.WAITING: {Phase.RUNNING, Phase.FINISHED},
    Phase.RUNNING: {Phase.WAITING, Phase.FINISHED},
    Phase.FINISHED: set[Phase](),
}


@dataclass(slots=True)
class _Span:
    version: WeightVersion
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sample:
    """One of the `n` samples of a request."""

    key: int
    """Order of arrival: the smaller one goes first."""
    request_id: str
    sample_index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    """With the seed that is used."""
    salt: str | None = None
    forced: tuple[int, ...] = ()
    """The first output tokens, given instead of drawn."""
    stream_text: bool = False
    """Whether its text is decoded token by token."""
    lora: AdapterVersion | None = None
    siblings: list["Sample"] = field(default_factory=list)
    """Samples that start from this one's prefill, until it is done."""

    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the output. Numbers alone: an object per token had Python's collector walk through all of them, 0.2 s at a time."""
    drawn: list[Drawn] = field(default_factory=list)
    """All that a draw gave, where alternatives or logits were asked for."""
    prompt_scores: list[Scored] = field(default_factory=list)
    reported: int = 0
    """Output tokens that updates have told of."""
    finish_reason: FinishReason | None = None
    problem: Problem | None = None

    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cache_keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks, as far as they were needed."""
    published: int = 0
    """Leading blocks that the prefix cache was told of."""
    straddles: bool = False
    """Its KV comes from more than one set of weights, so no block of it may be shared."""
    mixed_kv: bool = False
    """Some token of it was drawn over KV of more than one set of weights, so no single set can score it again."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache gave at the first admission."""
    preemptions: int = 0
    written: list[_Span] = field(default_factory=list)
    """Weights that wrote the KV of positions [0, computed)."""
    _versions: list[_Span] = field(default_factory=list)
    _looked_back: bool = False
    """Whether the last token was drawn from the KV in `written`, rather than from what was forgotten since."""
    _seen: tuple[LineageSegment, ...] = ()
    past: list[LineagePass] = field(default_factory=list)
    """KV that tokens were drawn from and that was forgotten since; runs under one set of weights are one pass."""

    @property
    def length(self) -> int:
        """Tokens that are known."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens without KV; at least one while the sample lives, since the last is never forwarded early."""
        return self.length - self.computed

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Weights that made each output token's logits."""
        return tuple(VersionSpan(span.version, span.start, span.end) for span in self._versions)

    @property
    def lineage(self) -> tuple[LineageSegment, ...]:
        """Weights that wrote the KV which the last drawn token looked back on; empty before the first."""
        return self._segments() if self._looked_back else self._seen

    @property
    def tokens_left(self) -> int:
        """Output tokens that it may still get."""
        return self.sampling.max_tokens - len(self.output)

    @property
    def next_forced(self) -> int | None:
        """The next output token, where it is given."""
        return self.forced[len(self.output)] if len(self.output) < len(self.forced) else None

    def weights(self, version: WeightVersion) -> str:
        """What its KV is computed with, under base weights of `version`: an adapter's digest covers its base."""
        return self.lora.digest if self.lora is not None else version.digest or version.label

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions [start, end)."""
        prompt_length = len(self.prompt)
        if start >= prompt_length:
            return tuple(self.output[start - prompt_length : end - prompt_length])
        return (*self.prompt[start:end], *self.output[: max(end - prompt_length, 0)])

    def move(self, phase: Phase) -> None:
        """Only along the arrows above."""
        if phase not in _MOVES[self.phase]:
            raise InvariantBroken(
                f"sample {self.key} of {self.request_id!r} went from {self.phase} to {phase}"
            )
        self.phase = phase

    def write(self, end: int, version: WeightVersion) -> None:
        """The KV of positions [computed, end) is there now."""
        if not self.computed < end <= self.length:
            raise InvariantBroken(
                f"sample {self.key} has KV for {self.computed} of {self.length} tokens; it cannot be written to {end}"
            )
        _extend(self.written, version, self.computed, end)
        self.computed = end

    def append(self, drawn: Drawn, version: WeightVersion) -> None:
        """One more token, drawn from logits of `version`."""
        if self.remaining:
            raise InvariantBroken(
                f"sample {self.key} drew a token with {self.remaining} still to be forwarded"
            )
        self.output.append(drawn.token_id)
        self.logprobs.append(drawn.logprob)
        if self.sampling.logprobs or drawn.logit is not None:
            self.drawn.append(drawn)
        _extend(self._versions, version, len(self.output) - 1, len(self.output))
        self._looked_back = True
        self.mixed_kv |= self.straddles

    def start_from(self, leader: "Sample") -> None:
        """Take over what the leader's prefill gave; the caller counts the references to its blocks."""
        self.computed = leader.computed
        self.blocks = list(leader.blocks)
        self.cache_keys = list(leader.cache_keys)
        self.published, self.straddles = leader.published, leader.straddles
        self.cached_tokens = leader.cached_tokens
        self.prompt_scores = leader.prompt_scores
        self.written = [_Span(span.version, span.start, span.end) for span in leader.written]

    def reuse(self, num_tokens: int, version: WeightVersion) -> None:
        """The first `num_tokens` have KV from the prefix cache, written under weights equal to `version`."""
        if num_tokens:
            self.write(num_tokens, version)
        if self.cached_tokens is None:
            self.cached_tokens = min(num_tokens, len(self.prompt))

    def forget(self) -> list[int]:
        """All KV is to be recomputed. Returns the blocks, last first, so that heads of prefixes stay longest."""
        self._seen = self.lineage
        if self._looked_back:
            self._end_pass()
        self._looked_back = False
        blocks = self.blocks[::-1]
        self.blocks, self.cache_keys, self.computed, self.published = [], [], 0, 0
        self.straddles, self.written = False, []
        if not self.output:
            # Scores of one prompt come from one set of weights: a restart may follow a swap.
            self.prompt_scores = []
        return blocks

    def _end_pass(self) -> None:
        ended = LineagePass(len(self.output), self._seen)
        if self.past and ended.version is not None and self.past[-1].version == ended.version:
            self.past.pop()
        self.past.append(ended)

    def _segments(self) -> tuple[LineageSegment, ...]:
        last = self.length - 1
        return tuple(
            LineageSegment(span.version, span.start, min(span.end, last))
            for span in self.written
            if span.start < last
        )

    def finish(self, reason: FinishReason, problem: Problem | None = None) -> None:
        """The end, with its reason."""
        self.move(Phase.FINISHED)
        self.finish_reason, self.problem = reason, problem
        if self.past and self.past[-1].end == len(self.output):
            # The KV of the last tokens, which `lineage` has.
            self.past.pop()


def _extend(spans: list[_Span], version: WeightVersion, start: int, end: int) -> None:
    if spans and spans[-1].version == version:
        spans[-1].end = end
    else:
        spans.append(_Span(version, start, end))


def ended_by_tokens(sample: Sample, eos_ids: Collection[int]) -> FinishReason | None:
    """What the ids alone say: a stop token, or enough of them. Given tokens are played to their end."""
    params, count = sample.sampling, len(sample.output)
    if count >= params.min_tokens and count >= len(sample.forced):
        token = sample.output[-1]
        if token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos):
            return FinishReason.STOP
    return FinishReason.LENGTH if count >= params.max_tokens else None


def expand(leader: Sample, keys: Sequence[int]) -> None:
    """Give `leader` its siblings, one for each of `keys`."""
    leader.siblings = [
        Sample(
            key,
            leader.request_id,
            index,
            leader.prompt,
            leader.sampling,
            leader.salt,
            leader.forced,
            leader.stream_text,
            leader.lora,
        )
        for index, key in enumerate(keys, start=1)
    ]
