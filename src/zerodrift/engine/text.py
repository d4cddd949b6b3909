"""From ids to text while they come, and where a stop string ends it.

Text that may still change is held back: half a character, or the beginning of what may become a stop string.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from zerodrift.core.completion import FinishReason
from zerodrift.engine.sample import Sample, ended_by_tokens

MAX_STOP_CHARACTERS = 1024
"""A stream holds back as much text as the longest stop string has; 1,024 characters are a screenful."""
_UNFINISHED = "\ufffd"


class Text:
    """The text of one growing sample."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = _stream_of(tokenizer)
        self._stops = tuple(stops)
        self._held_back = max((len(stop) for stop in stops), default=1) - 1
        self._read = 0
        self._given = 0
        self._searched = 0
        self.text = ""
        self.stopped = False

    def update(self, ids: Sequence[int], *, may_stop: bool) -> bool:
        """Take the text of all `ids`, of which the first were seen before; True once a stop string is found."""
        self.text += self._new_text(ids)
        if may_stop and self._stops:
            self._search()
        # What stands here before the minimum is reached may have been shown: only what ends later counts.
        self._searched = len(self.text)
        return self.stopped

    def finish(self, ids: Sequence[int]) -> str:
        """All there is: what was held back too, unless a stop string ended it."""
        if not self.stopped:
            self.text += self._decode(ids)[len(self.text) :]
        return self.text

    def take(self, *, finished: bool) -> str:
        """What can be shown now and was not shown before."""
        end = len(self.text) if finished else max(len(self.text) - self._held_back, self._given)
        piece = self.text[self._given : end]
        self._given = end
        return piece

    def _new_text(self, ids: Sequence[int]) -> str:
        if self._stream is not None:
            backend, unread, self._read = self._tokenizer.backend_tokenizer, ids[self._read :], len(ids)
            try:
                return "".join([self._stream.step(backend, token) or "" for token in unread])
            except Exception:
                # Half a character, drawn in the middle of bytes, has changed text that was shown: from here on by hand.
                self._stream = None
        whole = self._decode(ids)
        return "" if whole.endswith(_UNFINISHED) else whole[len(self.text) :]

    def _search(self) -> None:
        # A stop string that ends in new text began at most its own length before.
        start = max(self._searched - self._held_back, 0)
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True) if ids else ""
        return text


def _stream_of(tokenizer: Any) -> DecodeStream | None:
    """What decodes token by token; None for a tokenizer of another library, or one that cleans up what it decoded."""
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        return None
    return None if tokenizer.clean_up_tokenization_spaces else DecodeStream(skip_special_tokens=True)


class Texts:
    """The texts of all samples that need one while they grow: those with stop strings, and those that are streamed."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._growing: dict[int, Text] = {}

    def ended(self, sample: Sample) -> FinishReason | None:
        """What ids and text say after one more token."""
        if self.tokenizer is not None and (sample.sampling.stop or sample.stream_text):
            text = self._growing.get(sample.key)
            if text is None:
                text = self._growing[sample.key] = Text(self.tokenizer, sample.sampling.stop)
            enough = len(sample.output) >= max(sample.sampling.min_tokens, len(sample.forced))
            if text.update(sample.output, may_stop=enough):
                return FinishReason.STOP
        return ended_by_tokens(sample, self._eos_ids)

    def take(self, sample: Sample) -> str:
        """The part of a streamed sample's text that can be shown now and was not taken yet."""
        text = self._growing.get(sample.key) if sample.stream_text else None
        return "" if text is None else text.take(finished=False)

    def finish(self, sample: Sample) -> tuple[str | None, str]:
        """The whole text of a sample that ended, and of a streamed one the part that was not taken yet."""
        if self.tokenizer is None:
            return None, ""
        text = self._growing.pop(sample.key, None) or Text(self.tokenizer, sample.sampling.stop)
        whole = text.finish(sample.output)
        return whole, text.take(finished=True) if sample.stream_text else ""
