import pytest
import torch

import zerodrift as zd
from zerodrift.models import testbed
from zerodrift.models.warmup import _IGNORED, _examples, problems, warm_up
from zerodrift.weights.digest import model_digest


@torch.no_grad()
def accuracy(model, tokenizer) -> float:
    """Fraction of the hundred sums of which every answer token, EOS included, is the likeliest."""
    ids_NT, labels_NT = _examples(tokenizer, problems())
    right_NT = model(ids_NT).logits[:, :-1].argmax(-1) == labels_NT[:, 1:]
    return float((right_NT | (labels_NT[:, 1:] == _IGNORED)).all(-1).double().mean())


def test_the_problems_are_all_sums_of_two_digits():
    assert len(problems()) == 100
    assert ("3+4=", "7") in problems()
    assert ("9+9=", "18") in problems()


def test_questions_keep_their_ids_when_the_answer_follows(tokenizer):
    """Else the labels would lie beside the tokens."""
    for question, answer in problems():
        ids = tokenizer.encode(question)
        assert tokenizer.encode(question + answer)[: len(ids)] == ids


def test_a_few_steps_lower_the_loss_the_same_way_each_time(tokenizer):
    models = [testbed.build("llama") for _ in range(2)]
    before = torch.random.get_rng_state()
    losses = [warm_up(model, tokenizer, steps=6) for model in models]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
    assert model_digest(models[0]) == model_digest(models[1]) != model_digest(testbed.build("llama"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in models[0].parameters())


def test_an_untrained_model_cannot_add(tokenizer):
    assert accuracy(testbed.build("llama"), tokenizer) < 0.05


@pytest.mark.long
def test_a_warmed_up_model_adds(name, tokenizer, tmp_path):
    directory = zd.models.materialise(f"testbed:{name}", tmp_path, warmup=True)
    model = zd.models.load(directory)
    assert accuracy(model, tokenizer) >= 0.95
    prompt = torch.tensor([tokenizer.encode("3+4=")])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(ids[0]) == "3+4=7<|eos|>"
