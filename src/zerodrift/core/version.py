"""Which weights made a token: versions, the spans of tokens they cover, and where the KV came from.

A version is the caller's label *and* the digest of the weights, because a label alone proves nothing: engines
publish one that anybody may set without touching a tensor.
"""

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidCompletion, InvalidValue


class WeightVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of weights: a label, and the digest that says whether the label is true."""

    label: str
    digest: str | None = None
    """sha256 over the manifest in checkpoint space; None where the engine gives only a label."""

    def __post_init__(self) -> None:
        """A version must be nameable."""
        require.instance(InvalidValue, "label", self.label, str)
        require.instance(InvalidValue, "digest", self.digest, str | None)
        if not self.label:
            raise InvalidValue("a weight version needs a non-empty label; use the training step or a digest")


class AdapterVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter beside a set of weights: the name that requests ask for, and a digest over base, A, B and scale."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        """It can be asked for."""
        require.instance(InvalidValue, "digest", self.digest, str)
        if not isinstance(self.name, str) or not self.name:
            raise InvalidValue(f"an adapter is called {self.name!r}; requests ask for it by a non-empty name")


class _Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: WeightVersion
    start: int
    end: int

    def __post_init__(self) -> None:
        """It covers at least one token."""
        require.instance(InvalidValue, "version", self.version, WeightVersion)
        require.whole(InvalidValue, "start", self.start, "it counts from 0", 0)
        require.whole(InvalidValue, "end", self.end, "it lies after the start", self.start + 1)


class VersionSpan(_Span, frozen=True, forbid_unknown_fields=True):
    """Output tokens [start, end) were sampled from the logits of `version`."""


class LineageSegment(_Span, frozen=True, forbid_unknown_fields=True):
    """KV of absolute positions [start, end) (prompt included) was written under `version`.

    A span says which weights made the logits; a segment says which weights made what those logits looked back
    on. After an in-flight update that keeps the cache the two differ, and only both together can be replayed.
    """


class LineagePass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Output tokens up to `end`, from where the pass before ends, looked back on the KV of `segments`.

    KV that is forgotten, at a swap of weights or to make room, is written anew: then another pass begins.
    """

    end: int
    segments: tuple[LineageSegment, ...]

    @property
    def version(self) -> WeightVersion | None:
        """Of all segments, where it is one."""
        versions = {segment.version for segment in self.segments}
        return versions.pop() if len(versions) == 1 else None


def check_cover(spans: tuple[VersionSpan, ...] | tuple[LineageSegment, ...], length: int, what: str) -> None:
    """`spans` cover [0, length) in order, without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position:
            raise InvalidCompletion(
                f"{what} leave {position}..{span.start} uncovered or twice covered; "
                "each token has exactly one version"
            )
        position = span.end
    if position != length:
        raise InvalidCompletion(f"{what} cover {position} of {length}; each token has exactly one version")
