"""Each way for an update to go wrong, against tensors exchanged by hand."""

from typing import Any

import pytest
import torch
from tests.tiny_models import tiny

from zerodrift import models
from zerodrift.audit.counterfactual.delivery import Delivery, deliveries, not_asked
from zerodrift.audit.perturb import perturbed

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama():
    old = models.load("testbed:llama")
    return old, perturbed(old, 1).new


def find(pair: tuple[Any, Any], words: str) -> Delivery:
    (delivery,) = [each for each in deliveries(*pair) if words in each.message]
    return delivery


def state(model: Any) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(one: State, other: State) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_every_delivery_differs_from_the_update_and_changes_neither_model(llama):
    before = state(llama[0]), state(llama[1])
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        whole = llama[1](ids).logits
        for delivery in deliveries(*llama):
            assert not torch.equal(delivery.build()(ids).logits, whole), delivery.message
    assert not differing(before[0], state(llama[0]))
    assert not differing(before[1], state(llama[1]))


def test_rounded_on_the_way(llama):
    delivery = find(llama, "the update arrived rounded to bf16")
    assert delivery.cause == "weights/dtype"
    built, new = state(delivery.build()), state(llama[1])
    for name in new:
        assert torch.equal(built[name], new[name].bfloat16().float())


def test_only_vectors_rounded(llama):
    built, new = state(find(llama, "vectors").build()), state(llama[1])
    for name in new:
        expected = new[name].bfloat16().float() if new[name].dim() == 1 else new[name]
        assert torch.equal(built[name], expected), name


def test_rows_in_turn(llama):
    built, new = state(find(llama, "in turn").build()), state(llama[1])
    gate, up = (f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up"))
    half = len(new[gate]) // 2
    assert torch.equal(built[gate][::2], new[gate][:half])
    assert torch.equal(built[gate][1::2], new[up][:half])
    assert torch.equal(built[up][::2], new[gate][half:])
    assert torch.equal(built[up][1::2], new[up][half:])


@pytest.mark.parametrize(("word", "sources"), [("late", (0, 0)), ("early", (1, 1))])
def test_layers_moved_on(llama, word, sources):
    built, new = state(find(llama, f"one place too {word}").build()), state(llama[1])
    for layer, source in enumerate(sources):
        name = "model.layers.{}.self_attn.q_proj.weight"
        assert torch.equal(built[name.format(layer)], new[name.format(source)])


def test_tables_of_zero(llama):
    built = find(llama, "rotary tables zero").build()
    tables = built.model.rotary_emb(torch.ones(1, 3, 256), torch.arange(3)[None])
    assert [float(table.abs().sum()) for table in tables] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("words", "embedding_is_new"),
    [
        ("the embedding was updated and the head was not", True),
        ("the head was updated and the embedding", False),
    ],
)
def test_one_end_of_a_tie(llama, words, embedding_is_new):
    old, new = llama
    built = find(llama, words).build()
    source = (old.get_input_embeddings().weight, new.get_input_embeddings().weight)
    embedding, head = built.get_input_embeddings().weight, built.get_output_embeddings().weight
    assert torch.equal(embedding, source[embedding_is_new])
    assert torch.equal(head, source[not embedding_is_new])
    for name, tensor in built.state_dict().items():
        if "layers" in name:
            assert torch.equal(tensor, new.state_dict()[name]), name


def test_an_untied_head_cannot_come_loose():
    old = models.load("testbed:qwen3")
    causes = {each.cause for each in deliveries(old, perturbed(old, 1).new)}
    assert "weights/tied-head" not in causes
    assert {"weights/dtype", "weights/swapped", "weights/buffer"} <= causes


@pytest.mark.parametrize(
    ("words", "layers"),
    [("gate_proj and up_proj exchanged in every layer", (0, 1)), ("gate_proj and up_proj of layer 1", (1,))],
)
def test_projections_under_each_others_names(llama, words, layers):
    built, new = state(find(llama, words).build()), state(llama[1])
    expected = {f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in layers for name in ("gate", "up")}
    assert differing(built, new) == expected
    for name in expected:
        twin = name.replace("gate", "X").replace("up_", "gate_").replace("X", "up")
        assert torch.equal(built[name], new[twin])


def test_only_projections_of_one_shape_are_exchanged(llama):
    """Queries have twice the heads of keys: an engine would refuse them, so nothing is asked."""
    says = [each.message for each in deliveries(*llama)]
    assert any("k_proj and v_proj" in each for each in says)
    assert not any("q_proj and k_proj" in each for each in says)


def test_layers_under_each_others_names(llama):
    built, new = state(find(llama, "layers 0 and 1 arrived").build()), state(llama[1])
    assert differing(built, new) == {name for name in new if ".layers." in name}
    for name in new:
        if ".layers.0." in name:
            assert torch.equal(built[name], new[name.replace(".0.", ".1.")])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rotary frequencies rounded", lambda t: t.bfloat16().to(t.dtype)),
        ("rotary frequencies zero", torch.zeros_like),
    ],
)
def test_rotary_frequencies(llama, words, expected):
    delivery = find(llama, words)
    assert delivery.cause == "weights/buffer"
    built = delivery.build()
    assert torch.equal(built.model.rotary_emb.inv_freq, expected(llama[1].model.rotary_emb.inv_freq))


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "mixtral", "mamba", "gemma3_text", "qwen3_moe"])
def test_other_families_are_asked_what_they_have_parts_for(model_type):
    old = tiny(model_type)
    new = perturbed(old, 1).new
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        whole = new(ids).logits
        differing_ones = [
            each.message for each in deliveries(old, new) if not torch.equal(each.build()(ids).logits, whole)
        ]
    assert differing_ones == [each.message for each in deliveries(old, new)]
    swaps = {"gate and up", "k and v", "q and k"}
    lacks = {
        "gpt2": {"gate and up"},
        "gpt_neox": swaps,
        "mixtral": {"gate and up"},
        "mamba": swaps,
    }.get(model_type, set())
    unasked = {f"{each} projections exchanged" for each in lacks}
    rotary = {"rotary frequencies left wrong"} if model_type in ("gpt2", "mamba") else set()
    assert set(not_asked(new)) == unasked | rotary


def test_layers_of_other_shapes_do_not_change_places():
    """The first layer has experts and the second is dense: neither can hold what the other has."""
    model = tiny("qwen3_moe", mlp_only_layers=[1])
    says = [each.message for each in deliveries(model, model)]
    assert not any("layers 0 and 1 arrived" in each or "one place too" in each for each in says)
    assert not any("gate_proj of layers 0 and 1" in each for each in says)
