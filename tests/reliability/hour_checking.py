"""Are the tokens right that a server gave? Each is computed again, bit for bit, under the weights that its answer names."""

import time
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hour_traffic import MODEL, Span, Told

from zerodrift import exact, models
from zerodrift.core.completion import FinishReason
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineagePass, LineageSegment, VersionSpan, WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output
from zerodrift.engine.replay import replay
from zerodrift.engine.weights import StagedWeights
from zerodrift.weights.digest import checkpoint_state, model_digest

REPLAYED = 6
"""One sample in so many is drawn again with its seed; of the others the logprobs are computed, by the trainer's forward."""


PATIENCE_S = 30


class Published(NamedTuple):
    """A version, as the server said when it began to serve it."""

    label: str
    digest: str
    kv: str


class Wrong(Exception):
    """A token has other bits than the weights that its answer names give."""


class Checker:
    """Holds samples against the checkpoints that were published."""

    def __init__(self, checkpoints: list[Path]) -> None:
        """`checkpoints`: every set of weights that may be served, the first among them."""
        self.engine = Engine(MODEL, num_blocks=64)
        self._numeric = self.engine.fingerprint().numeric
        loaded = [exact.prepare(models.load(str(path))) for path in checkpoints]
        self._models = {model_digest(model): model for model in loaded}
        self._published: dict[str, Published] = {}
        self.tokens = self.samples = self.replayed = self.mixed = self.kept = 0

    @property
    def digests(self) -> list[str]:
        return [*self._models]

    def publish(self, version: Published) -> None:
        if version.label in self._published:
            raise Wrong(f"{version.label!r} was published twice")
        if version.digest not in self._models:
            raise Wrong(f"{version.label!r} has digest {version.digest}, which no checkpoint has")
        self._published[version.label] = version

    def check(self, told: Told) -> None:
        """Raise what is wrong with it."""
        self._await({*told.labels, *(span.label for span in told.spans)})
        self.samples += 1
        if told.kind == "score":
            self._check_score(told)
        elif not told.spans:
            self._check_left(told)
        else:
            self._check_sample(told)

    def _await(self, labels: set[str]) -> None:
        """A token may come before the answer to the update that made its weights current."""
        deadline = time.monotonic() + PATIENCE_S
        while not labels <= self._published.keys() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _check_sample(self, told: Told) -> None:
        self._check_cover(told, len(told.tokens))
        self.tokens += len(told.tokens)
        kept = any(self._is_kept(*pair) for pair in pairwise(told.spans))
        self.mixed += len(told.spans) > 1
        self.kept += kept
        if told.adapter is not None:
            return  # by `check_adapted`
        if kept or self.samples % REPLAYED == 0:
            self.replayed += 1
            found = replay(self.engine, self.as_output(told), self.weights_of)
            self._compare(told, found.token_ids, found.logprobs)
        else:
            logprobs = [self._scored(span.digest, told)[span.start : span.end] for span in told.spans]
            self._compare(told, told.tokens, [each for part in logprobs for each in part])

    def _check_score(self, told: Told) -> None:
        self._check_cover(told, len(told.prompt))
        self.tokens += len(told.prompt) - 1
        if len(told.spans) > 1 and any(self._published[span.label].kv == "keep" for span in told.spans[1:]):
            raise Wrong("one forward ran on two versions")
        whole = told._replace(prompt=told.prompt[:1], tokens=told.prompt[1:], logprobs=told.logprobs[1:])
        self._compare(whole, whole.tokens, self._scored(told.spans[-1].digest, whole))

    def _check_left(self, told: Told) -> None:
        """Nobody said which weights: each token is of one that served meanwhile, and they change in their order."""
        self.tokens += len(told.tokens)
        if any(self._published[label].kv == "keep" for label in told.labels[1:]) or not told.tokens:
            return
        rows = [self._scored(self._published[label].digest, told) for label in told.labels]
        version = 0
        for place, logprob in enumerate(told.logprobs):
            while version < len(rows) and rows[version][place] != logprob:
                version += 1
            if version == len(rows):
                raise Wrong(f"{told.kind}: token {place} has bits of none of {told.labels}: {told}")

    def check_adapted(self, told: Told, path: Path) -> None:
        """A sample with an adapter beside the weights: served again by an engine that has both."""
        self.check(told)
        [span] = told.spans
        engine = Engine(self._models_state(span.digest), version=WeightVersion(span.label, span.digest))
        engine.load_adapter("again", path)
        [output] = engine.generate([told.prompt], self._sampling(told), lora="again")
        assert output.lora is not None
        assert told.adapter is not None
        if output.lora.digest != told.adapter["digest"]:
            raise Wrong(
                f"the adapter has digest {told.adapter['digest']}, and {output.lora.digest} was saved"
            )
        self._compare(told, output.token_ids, output.logprobs)

    def _models_state(self, digest: str) -> Any:
        model = models.load(MODEL)
        model.load_state_dict(self._models[digest].state_dict())
        return model

    def _check_cover(self, told: Told, length: int) -> None:
        place = 0
        for span in told.spans:
            known = self._published.get(span.label)
            if known is None or known.digest != span.digest:
                raise Wrong(f"{told.kind} names {span}, which was not published so")
            if span.start != place:
                raise Wrong(f"{told.kind}: spans leave a gap at {place}: {told.spans}")
            place = span.end
        if place != length:
            raise Wrong(f"{told.kind}: spans cover {place} of {length} tokens")

    def _compare(self, told: Told, tokens: Any, logprobs: Any) -> None:
        given = [(token, value.hex()) for token, value in zip(told.tokens, told.logprobs, strict=True)]
        found = [(token, value.hex()) for token, value in zip(tokens, logprobs, strict=True)]
        if given != found:
            place = next(at for at, pair in enumerate(zip(given, found, strict=True)) if len({*pair}) == 2)
            raise Wrong(
                f"{told.kind}: token {place} is {given[place]}, and {found[place]} by {told.spans}: {told}"
            )

    @torch.no_grad()
    def _scored(self, digest: str, told: Told) -> list[float]:
        """By the trainer's own forward over the whole sequence."""
        one = told._replace(spans=[Span("one", digest, 0, len(told.tokens))])
        [row] = exact.token_logprobs(self._models[digest], [self.as_output(one)])
        return row.tolist()

    def as_output(self, told: Told) -> Output:
        """As the engine had it."""
        spans = told.spans
        past, lineage = self._passes(told, spans)
        return Output(
            prompt_token_ids=tuple(told.prompt), token_ids=tuple(told.tokens), logprobs=tuple(told.logprobs),
            kind=self.engine.mode.kind, sampling=self._sampling(told), finish_reason=FinishReason.LENGTH,
            versions=tuple(VersionSpan(_version(each), each.start, each.end) for each in spans),
            fingerprint="", sample_index=told.index, lineage=lineage, past=past, request_id=told.kind,
            numeric=self._numeric,
        )  # fmt: skip

    def _passes(
        self, told: Told, spans: list[Span]
    ) -> tuple[tuple[LineagePass, ...], tuple[LineageSegment, ...]]:
        """Whose KV each token looked back on: all that was written anew at a swap, or what was kept."""
        past: list[LineagePass] = []
        segments: list[LineageSegment] = []
        for before, span in pairwise([None, *spans]):
            # The KV of a token is written when the next one is drawn.
            end, begin = len(told.prompt) + span.end - 1, segments[-1].end if segments else 0
            kept = before is not None and self._is_kept(before, span)
            if segments and not kept:
                past.append(LineagePass(span.start, tuple(segments)))
            if not kept:
                segments, begin = [], 0
            segments.append(LineageSegment(_version(span), begin, end))
        return tuple(past), tuple(segments)

    def _is_kept(self, before: Span, after: Span) -> bool:
        """Whether no version between the two had KV written anew: one may come and go between two tokens of a sample.

        A sample whose KV is written anew draws a token in the same step, so what nobody drew from was not written."""
        labels = [*self._published]
        between = labels[labels.index(before.label) + 1 : labels.index(after.label) + 1]
        return all(self._published[label].kv == "keep" for label in between)

    def _sampling(self, told: Told) -> SamplingParams:
        return SamplingParams(**told.sampling) if told.sampling else SamplingParams(seed=0)

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        return StagedWeights(self._tensors(version.digest), version)

    @cache  # noqa: B019  one checker lives as long as the run
    def _tensors(self, digest: str) -> Mapping[str, torch.Tensor]:
        staged = self.engine.stage_weights(checkpoint_state(self._models[digest]), "again")
        assert staged.version.digest == digest
        return staged.tensors


def _version(span: Span) -> WeightVersion:
    return WeightVersion(span.label, span.digest)
