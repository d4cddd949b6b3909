import pytest

from zerodrift import models
from zerodrift.audit.counterfactual.context import context_hypotheses, prompt_edits
from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.models.testbed_config import BOS_ID


@pytest.fixture(scope="module")
def tokenizer():
    return models.tokenizer("testbed:llama")


@pytest.mark.parametrize(
    ("name", "ids", "seen"),
    [
        ("cut-1", (5, 6, 7), (5, 6)),
        ("cut-2", (5, 6, 7), (5,)),
        # A prompt that would be cut to nothing stays as it is.
        ("cut-3", (5, 6, 7), (5, 6, 7)),
        ("cut-1", (5,), (5,)),
        ("bos-added", (5, 6), (BOS_ID, 5, 6)),
        ("bos-removed", (BOS_ID, 6), (6,)),
        ("bos-removed", (5, 6), (5, 6)),
        ("bos-removed", (BOS_ID,), (BOS_ID,)),
    ],
)
def test_an_edit_does_what_it_says(tokenizer, name, ids, seen):
    assert prompt_edits(tokenizer, BOS_ID)[name].edit(ids) == seen


def test_decoded_and_encoded_again(tokenizer):
    edit = prompt_edits(tokenizer, BOS_ID)["retokenised"].edit
    whole = tuple(tokenizer("The capital of France is", add_special_tokens=False)["input_ids"])
    assert edit(whole) == whole
    letters = tuple(
        token for letter in "The" for token in tokenizer(letter, add_special_tokens=False)["input_ids"]
    )
    assert edit(letters) == tuple(tokenizer("The", add_special_tokens=False)["input_ids"])
    assert edit(letters) != letters


def test_a_prompt_that_decodes_to_nothing_stays():
    class Mute:
        def decode(self, ids):
            return ""

        def __call__(self, text, **options):
            return {"input_ids": []}

    assert prompt_edits(Mute(), None)["retokenised"].edit((5, 6)) == (5, 6)


def test_no_bos_no_hypothesis_about_it(tokenizer):
    assert not any("bos" in name for name in prompt_edits(tokenizer, None))


def test_each_edit_is_one_hypothesis_and_none_is_made_twice(tokenizer):
    edits = prompt_edits(tokenizer, BOS_ID)
    hypotheses = list(context_hypotheses(Explanation(), edits))
    assert [h.explanation.context for h in hypotheses] == list(edits)
    assert {h.cause for h in hypotheses} == {"semantic/template", "semantic/retokenised", "semantic/bos"}
    assert list(context_hypotheses(hypotheses[0].explanation, edits)) == []
