import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.models import tokenizer_testbed
from zerodrift.models.testbed_config import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE

# Ids are part of the testbed: a change moves every golden number that others recorded.
GOLDEN_SHA256 = "7eec51722cdbf4c7baaee711dcc74d2fcd24bb043c753e133efcfba14a79a53d"


def test_ids_are_the_same_on_every_machine(tokenizer):
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [token_id for _, token_id in vocabulary] == list(range(VOCAB_SIZE))
    assert hashlib.sha256(repr(vocabulary).encode()).hexdigest() == GOLDEN_SHA256


def test_qwen2_alone_normalises():
    decomposed, composed = "e\u0301", "\u00e9"
    plain, qwen2 = tokenizer_testbed.build("qwen3"), tokenizer_testbed.build("qwen2")
    assert plain.encode(decomposed) != plain.encode(composed)
    assert qwen2.encode(decomposed) == qwen2.encode(composed) == plain.encode(composed)


def test_two_builds_agree(tokenizer):
    assert tokenizer_testbed.build().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_special_tokens(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokenizer_testbed.SPECIAL_TOKENS]
    assert ids == [BOS_ID, EOS_ID, IM_START_ID, IM_END_ID] == sorted(tokenizer.all_special_ids)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert tokenizer.encode("a<|eos|>")[-1] == EOS_ID


def test_it_is_fast(tokenizer):
    assert tokenizer.is_fast


@given(text=st.text())
def test_any_text_survives(text):
    tokenizer = _shared()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "  two  spaces ", "\r\n\t\0", "e\u0301 is not \u00e9", "\U0001f9d1\u200d\U0001f680", "<|im_end|>\n",
     " , . !", "don 't", "12+7=19", "\ufeff\u202e\ufffd"],
)  # fmt: skip
def test_texts_that_tokenizers_like_to_change(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_used(tokenizer):
    assert len(tokenizer.encode("the lighthouse")) < len("the lighthouse") / 2


def test_some_ids_do_not_survive_their_text(tokenizer):
    """What a retokenising engine gets wrong: letters one by one are not the ids of the word."""
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer.decode(letters) == "the"
    assert tokenizer.encode("the") != letters


def test_half_a_character_does_not_survive_either(tokenizer):
    half = tokenizer.encode("\u00e9")[:1]
    assert tokenizer.encode(tokenizer.decode(half)) != half


def test_no_token_is_added_to_plain_text(tokenizer):
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


def test_the_chat_prompt_ends_with_a_newline(tokenizer):
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "3+4?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(ids) == tokenizer.encode(text)
    assert not tokenizer.apply_chat_template(messages, tokenize=False).endswith("assistant\n")


_BUILT = []


def _shared():
    """Hypothesis refuses fixtures of function scope and is slow with a build per example."""
    if not _BUILT:
        _BUILT.append(tokenizer_testbed.build())
    return _BUILT[0]
