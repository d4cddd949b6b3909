from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from zerodrift.core.completion import FinishReason
from zerodrift.core.request import SamplingParams
from zerodrift.engine.sample import Sample
from zerodrift.engine.text import Text, Texts
from zerodrift.models import tokenizer as load_tokenizer

TOKENIZER = load_tokenizer("testbed:qwen3")


def stream(text: Text, ids: list[int]) -> str:
    pieces = []
    for end in range(1, len(ids) + 1):
        if text.update(ids[:end], may_stop=True):
            break
        pieces.append(text.take(finished=False))
    text.finish(ids)
    return "".join([*pieces, text.take(finished=True)])


@given(st.lists(st.integers(4, 511), max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_pieces_joined_are_the_whole(ids: list[int], stops: list[str]) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    shown = stream(Text(TOKENIZER, stops), ids)
    if any(stop in whole for stop in stops):
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == whole


class Foreign:
    """A tokenizer of another library: it can decode, and nothing else is known of it."""

    @staticmethod
    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def words_and_bytes() -> Any:
    """A tokenizer of words whose leading space is a sign, with bytes for what it has no word for: as Llama 2 has it."""
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    words = ["<s>", "\u2581a", "\u2581", "b", "\u2581c\u2581d", "!", *bytes_]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="!"))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, 511), max_size=30))
def test_tokenizers_of_another_library_are_decoded_alike(ids: list[int]) -> None:
    assert stream(Text(Foreign(), []), ids) == TOKENIZER.decode(ids, skip_special_tokens=True)


# A run of bytes that does not end with its character is decoded as a whole to other signs than its beginning.
CHARACTERS = [[6 + 0xC3, 6 + 0xA9, 3], [6 + 0xE2, 6 + 0x82, 6 + 0xAC, 4], *([number] for number in range(6))]


@given(st.lists(st.sampled_from(CHARACTERS), max_size=12).map(lambda parts: list(chain(*parts))))
def test_words_and_bytes_are_decoded_as_a_whole_would_be(ids: list[int]) -> None:
    tokenizer = words_and_bytes()
    assert stream(Text(tokenizer, []), ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_that_are_no_text_end_nothing() -> None:
    """A vendor's decoder raises where half a character changes what was shown before it."""
    tokenizer, ids = words_and_bytes(), [6 + 0x41, 6 + 0xA9, 6 + 0xE2, 3, 1]
    assert stream(Text(tokenizer, []), ids) == "A\ufffd\ufffdb a"


@given(st.text(max_size=40), st.integers(0, 30))
def test_text_is_cut_before_the_first_stop_string(before: str, extra: int) -> None:
    ids = TOKENIZER.encode(before + "END" + "x" * extra)
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    text = Text(TOKENIZER, ["END", "ENDxx"])
    assert stream(text, ids) == whole[: whole.index("END")]
    assert text.stopped


def test_a_stop_string_across_many_tokens_is_held_back() -> None:
    ids = TOKENIZER.encode("a###b")
    text = Text(TOKENIZER, ["###!"])
    shown = []
    for end in range(1, len(ids) + 1):
        text.update(ids[:end], may_stop=True)
        shown.append(text.take(finished=False))
    assert "".join(shown) in "a###b"
    assert len("".join(shown)) == len(text.text) - 3
    assert text.finish(ids) == "a###b"


def test_a_stop_string_before_the_minimum_does_not_count() -> None:
    """It was shown already; one that ends behind the minimum may begin before it."""
    ids = TOKENIZER.encode("a!b!!c")
    text, shown = Text(TOKENIZER, ["!", "b!!"]), ""
    for count in range(1, len(ids) + 1):
        stopped = text.update(ids[:count], may_stop=count > len(TOKENIZER.encode("a!b!")))
        shown += text.take(finished=stopped)
        if stopped:
            break
    assert shown == text.text == "a!"


def test_text_is_finished_once() -> None:
    ids = TOKENIZER.encode("ab€")
    text = Text(TOKENIZER, [])
    text.update(ids[:2], may_stop=True)
    assert text.finish(ids) == text.finish(ids) == "ab€"


def sample(**settings: Any) -> Sample:
    return Sample(3, "r", 0, (1,), SamplingParams(seed=0, **settings))


def test_texts_are_kept_only_where_they_are_needed() -> None:
    texts = Texts(TOKENIZER, [1])
    plain, stopping = sample(), sample(stop=("END",))
    plain.output = stopping.output = TOKENIZER.encode("xEND")
    assert texts.ended(plain) is None
    assert not texts._growing
    assert texts.finish(plain) == ("xEND", "")
    assert texts.ended(stopping) is FinishReason.STOP
    assert texts.take(stopping) == ""
    assert texts.finish(stopping) == ("x", "")
    assert not texts._growing


def test_a_streamed_text_is_taken_as_it_comes() -> None:
    texts, one = Texts(TOKENIZER, [1]), sample()
    one.stream_text = True
    one.output = TOKENIZER.encode("abc")
    texts.ended(one)
    assert texts.take(one) == "abc"
    one.output = TOKENIZER.encode("abcd")
    assert texts.finish(one) == ("abcd", "d")
    assert not texts._growing


def test_without_a_tokenizer_there_is_no_text() -> None:
    texts, one = Texts(None, [1]), sample()
    one.stream_text, one.output = True, [5]
    assert texts.ended(one) is None
    assert texts.take(one) == ""
    assert texts.finish(one) == (None, "")


@pytest.mark.parametrize("ids", [[], [1]])
def test_special_tokens_are_not_shown(ids: list[int]) -> None:
    assert Text(TOKENIZER, []).finish(ids) == ""
