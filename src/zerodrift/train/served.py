"""Rollouts of a server: groups are asked over HTTP while the learner learns, and every answer is held against what was sent.

Requests are drained on this side before weights change, so that each group is of one version, and which one that is follows
from the configuration alone. The server knows versions by labels of this process ("step 7 of 1f…"), so that a run that goes on
can send it step 7 once more; records have "step 7" with the digest of what was sent.
"""

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.backends.http import HttpClient
from zerodrift.core.completion import Answer, Completion, FinishReason
from zerodrift.core.errors import BadAnswer, ForeignTokens, VersionConflict
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.engine.output import Output
from zerodrift.engine.weights import StagedWeights
from zerodrift.sync.target import WeightTarget
from zerodrift.train.kept import KeptVersions
from zerodrift.train.records import version_label
from zerodrift.weights.gathered import whole_state
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.update import UpdateManifest


class ReachedServer(NamedTuple):
    """One that was reached and found fit, before anything is sent to it."""

    backend: Backend
    control: HttpClient | None
    """By which weights are sent, where that is another connection."""
    sends: Callable[[WeightTarget, UpdateManifest, Mapping[str, Any]], None]
    """Prepares and publishes, or raises by name what has become of it."""
    numeric: Mapping[str, str]
    """How an exact one computes; empty for one whose mismatch is measured."""
    salted: bool
    """Whether prompts are salted by version, so that no KV of other weights is found."""
    coarse: bool
    """Whether it computes in 16 bits."""
    width: int
    """Groups that are asked for together."""

    def close(self) -> None:
        """It is not ours and runs on. Twice does no harm."""
        self.backend.close()
        if self.control is not None:
            self.control.close()


class _Flying(NamedTuple):
    answer: Future[Answer]
    prompt: Prompt
    sampling: SamplingParams
    asked_at: int
    wire: WeightVersion
    """What the server calls the weights that it was asked of."""
    version: WeightVersion
    """What we do."""


class ServedSource:
    """One server behind `RolloutSource`."""

    def __init__(
        self, model: Any, server: ReachedServer, target: WeightTarget, kept: KeptVersions, *, first: int
    ) -> None:
        """`model` is the trainer's, at `first` steps: the server has its weights when this returns."""
        self._model, self._server, self._target, self._kept = model, server, target, kept
        self.exact = bool(server.numeric)
        self._session = uuid.uuid4().hex[:12]
        self._pool = ThreadPoolExecutor(server.width, "zerodrift-rollouts")
        self._flying: dict[int, _Flying] = {}
        try:
            self._wire, self.version = self._sent(first)
        except BaseException:
            self.close()
            raise
        self._number = first

    @property
    def model(self) -> Any:
        """The shape of every version."""
        return self._model

    def submit(self, index: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """From a thread of its own."""
        salt = self._wire.label if self._server.salted else None
        request = Request(msgspec.structs.replace(prompt, cache_salt=salt), sampling)
        answer = self._pool.submit(self._asked, request)
        self._flying[index] = _Flying(answer, prompt, sampling, self._number, self._wire, self.version)

    def done(self, index: int) -> bool:
        """Finished, or failed."""
        return self._flying[index].answer.done()

    def result(self, index: int) -> tuple[tuple[Output, ...], int]:
        """All samples, each whole, and of the very weights that it was asked of."""
        flying = self._flying[index]
        answer = flying.answer.result()
        del self._flying[index]
        for problem in answer.problems:
            raise BadAnswer(
                f"group {index} came back with {problem.message} ({problem.code}); nothing was trained on"
            )
        # Requests are drained before weights change, so that what was asked for under a version is of that one.
        outputs = tuple(self._output(index, flying, each) for each in answer.completions)
        return outputs, flying.asked_at

    def publish(self, number: int) -> WeightVersion:
        """After the last of what is in flight; what was wrong with that, `result` says."""
        wait([each.answer for each in self._flying.values()])
        self._wire, self.version = self._sent(number)
        self._number = number
        return self.version

    def has(self, version: WeightVersion) -> bool:
        """Whether its weights are still kept."""
        return self._kept.has(version)

    def weights_of(self, version: WeightVersion) -> StagedWeights:
        """Of a version that is kept, verified again."""
        return self._kept.weights_of(version)

    def close(self) -> None:
        """Ask for nothing more; what is in flight is waited for, and forgotten. Twice does no harm."""
        self._pool.shutdown(cancel_futures=True)
        self._server.close()

    # --- the steps -----------------------------------------------------------------------------------------------------

    def _asked(self, request: Request) -> Answer:
        return self._server.backend.generate([request])[0]

    def _sent(self, number: int) -> tuple[WeightVersion, WeightVersion]:
        """What the server calls them, and what we do."""
        tensors, tied = whole_state(self._model)
        label = f"{version_label(number)} of {self._session}"
        update = UpdateManifest(version=label, weights=manifest_of(tensors), tied=tied)
        self._server.sends(self._target, update, tensors)
        version = WeightVersion(version_label(number), update.weight_version.digest)
        self._kept.add(version, update.identity[:32])
        return update.weight_version, version

    def _output(self, index: int, flying: _Flying, told: Completion) -> Output:
        _check_whole(index, flying, told, self._model.config.vocab_size)
        _check_versions(index, flying.wire, told, exact=self.exact)
        made, looked_back_on = len(told.token_ids), len(flying.prompt.token_ids) + len(told.token_ids) - 1
        fields = {name: getattr(told, name) for name in Completion.__struct_fields__}
        # One version wrote all: what was drained looked back on nothing else. Of what is measured that is not known.
        fields["lineage"] = (LineageSegment(flying.version, 0, looked_back_on),) if self.exact else ()
        fields |= {"versions": (VersionSpan(flying.version, 0, made),), "sampling": flying.sampling}
        return Output(**fields, request_id=f"g{index}", numeric=self._server.numeric)


def _check_versions(index: int, wire: WeightVersion, told: Completion, *, exact: bool) -> None:
    """A server that is measured tells no digest: whether it has the weights that it names, the mismatch says."""
    digests = (wire.digest,) if exact else (None, wire.digest)
    for version in {span.version for span in told.versions}:
        if version.label != wire.label or version.digest not in digests:
            raise VersionConflict(
                f"group {index} was asked of {wire.label!r} with digest {wire.digest}, and {version.label!r} with digest "
                f"{version.digest} made some of it, which is not what was sent; nothing was trained on"
            )


def _check_whole(index: int, flying: _Flying, told: Completion, vocab_size: int) -> None:
    """As many tokens as were asked for, of this model, behind the prompt that was sent."""
    made, most = len(told.token_ids), flying.sampling.max_tokens
    if told.prompt_token_ids != flying.prompt.token_ids:
        raise BadAnswer(
            f"group {index} was sent {len(flying.prompt.token_ids)} prompt tokens, and others came back"
        )
    if told.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or not told.token_ids:
        raise BadAnswer(
            f"group {index}, sample {told.sample_index} ended as {told.finish_reason} after {made} tokens; nothing was trained on"
        )
    if made > most or (told.finish_reason is FinishReason.LENGTH and made < most):
        raise BadAnswer(
            f"group {index}, sample {told.sample_index} has {made} tokens and ended as {told.finish_reason}, and max_tokens is "
            f"{most}; nothing was trained on"
        )
    if strange := [token for token in told.token_ids if not 0 <= token < vocab_size]:
        raise ForeignTokens(
            f"group {index}, sample {told.sample_index} has token {strange[0]}, and the model has {vocab_size}"
        )
