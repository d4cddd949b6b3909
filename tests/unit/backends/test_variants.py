"""Every variant differs where it says so, agrees where it must, and leaves the original alone."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from zerodrift.backends import variants
from zerodrift.backends.reference import load_reference
from zerodrift.backends.teacher import Layout, Teacher

SEQUENCE = tuple((7 * i * i + 11) % 500 + 4 for i in range(90))

VARIANTS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda model: variants.in_dtype(model, torch.bfloat16),
    "bf16 head": lambda model: variants.with_head(model, torch.bfloat16),
    "4 bits": lambda model: variants.with_quantised_weights(model, 4),
    "8 bits": lambda model: variants.with_quantised_weights(model, 8),
    "Q4_0": variants.with_q4_0_weights,
    "fp8 cache": variants.with_fp8_kv,
    "rope": lambda model: variants.with_rope_bases(model, {"": 50_000.0}),
    "no window": variants.without_window,
}


# One with a tied head, one with a window and an untied head.
@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request):
    return load_reference(f"testbed:{request.param}").model


def logits(model: Any, layout: Layout = Layout.ALONE) -> torch.Tensor:
    teacher = Teacher(model, layout=layout, attention=model.config._attn_implementation)
    return next(teacher.logits([SEQUENCE], [1])).double()


def gap(model: Any, changed: Any) -> torch.Tensor:
    """How far each row's logprobs moved, at most."""
    return (logits(model).log_softmax(-1) - logits(changed).log_softmax(-1)).abs().amax(-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_original_stays_as_it_is(model, name):
    before = {key: tensor.clone() for key, tensor in [*model.state_dict().items(), *model.named_buffers()]}
    attention, settings, random = (
        model.config._attn_implementation,
        model.config.to_dict(),
        torch.random.get_rng_state(),
    )
    plain_TV = logits(model)
    changed = VARIANTS[name](model)
    changed_TV = logits(changed)
    assert not changed.training
    assert torch.isfinite(changed_TV).all()
    after = dict([*model.state_dict().items(), *model.named_buffers()])
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert model.config._attn_implementation == attention
    assert model.config.to_dict() == settings
    assert torch.equal(torch.random.get_rng_state(), random), "the global generator was drawn from"
    assert torch.equal(logits(model), plain_TV)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "window" not in name])
def test_a_variant_is_one(model, name):
    """Away from the original by more than rounding; the first token has no neighbours to be far from."""
    moved = gap(model, VARIANTS[name](model))
    assert moved[1:].median() > 1e-4
    if name == "rope":
        assert moved[0] < 1e-12
    else:
        assert moved.median() < 3


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_do_not_matter_in_a_variant_either(model, name):
    changed = VARIANTS[name](model)
    tolerance = 0.2 if name == "bf16" else 1e-9 if name != "bf16 head" else 0.1
    assert (logits(changed) - logits(changed, Layout.CHUNKED)).abs().max() < tolerance


def test_a_rounded_head_puts_logits_on_its_grid(model):
    rounded_TV = logits(variants.with_head(model, torch.bfloat16))
    assert torch.equal(rounded_TV.to(torch.bfloat16).double(), rounded_TV)
    plain_TV = logits(model)
    assert not torch.equal(plain_TV.to(torch.bfloat16).double(), plain_TV)


def test_a_rounded_head_leaves_the_embedding_alone(model):
    """Also where the two are one tensor."""
    changed = variants.with_head(model, torch.bfloat16)
    assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_lie_on_few_levels(model, bits):
    changed = variants.with_quantised_weights(model, bits)
    plain = dict(model.named_modules())
    linears = [
        (name, module)
        for name, module in changed.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    assert len(linears) == 7 * model.config.num_hidden_layers
    for name, module in linears:
        groups = module.weight.data.reshape(-1, variants.QUANT_GROUP)
        scale = plain[name].weight.data.reshape(-1, variants.QUANT_GROUP).abs().amax(-1, keepdim=True)
        levels = groups / scale * (2 ** (bits - 1) - 1)
        assert (levels - levels.round()).abs().max() < 1e-9
        assert levels.round().abs().max() == 2 ** (bits - 1) - 1
        # Rounding moves a weight by half a step at most.
        assert (
            (groups - plain[name].weight.data.reshape_as(groups)).abs() <= scale / (2**bits - 2) + 1e-12
        ).all()
    assert torch.equal(changed.get_output_embeddings().weight, model.get_output_embeddings().weight)


@pytest.mark.parametrize("group", [16, 64, 128])
def test_a_group_shares_one_scale(model, group):
    changed = variants.with_quantised_weights(model, 4, group)
    name = next(name for name, module in model.named_modules() if name.endswith("down_proj"))
    before, after = (each.get_submodule(name).weight.data.reshape(-1, group) for each in (model, changed))
    levels = after / before.abs().amax(-1, keepdim=True) * 7
    assert (levels - levels.round()).abs().max() < 1e-6
    assert variants.has_groups_of(model, group)
    assert not variants.has_groups_of(model, 3 * group)


def test_another_configuration_shares_the_weights(model):
    """A rotary base is fitted with a dozen models: copies of 135 million weights took longer than their forwards."""
    changed = variants.with_rope_bases(model, {"": 50_000.0})
    ours, theirs = (dict(each.named_parameters()) for each in (model, changed))
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].data_ptr() == ours[name].data_ptr() for name in ours)


def test_eight_bits_are_nearer_than_four(model):
    four, eight = (gap(model, variants.with_quantised_weights(model, bits)).mean() for bits in (4, 8))
    assert eight < four / 4


def test_the_fp8_cache_is_used_only_where_it_is_asked_for(model):
    """Its attention belongs to the copy; a teacher that asks for another gets that one."""
    changed = variants.with_fp8_kv(model)
    assert changed.config._attn_implementation == variants.FP8_KV
    plain = Teacher(changed, attention="sdpa").score([SEQUENCE])
    assert plain == Teacher(model, attention="sdpa").score([SEQUENCE])


def test_the_same_base_is_no_change(model):
    theta = model.config.rope_parameters["rope_theta"]
    assert gap(model, variants.with_rope_bases(model, {"": theta})).max() < 1e-12


def test_a_window_matters_beyond_its_width(model):
    moved = gap(model, variants.without_window(model))
    width = model.config.sliding_window if model.config.model_type == "mistral" else None
    if width is None:
        assert moved.max() < 1e-12
    else:
        assert moved[:width].max() < 1e-12
        assert moved[width:].min() > 1e-9
        assert moved[width:].median() > 1e-4
        narrowed = gap(model, variants.with_window(model, 40))
        assert narrowed[:40].max() < 1e-12
        assert narrowed[40:].min() > 1e-9


def test_a_variant_in_less_precision_is_whole(model):
    changed = variants.in_dtype(model, torch.bfloat16)
    assert {parameter.dtype for parameter in changed.parameters()} == {torch.bfloat16}


def test_less_precision_leaves_the_rotary_frequencies_alone(model):
    changed = dict(variants.in_dtype(model, torch.bfloat16).named_buffers())
    frequencies = {name: tensor for name, tensor in model.named_buffers() if "inv_freq" in name}
    assert frequencies
    assert all(torch.equal(changed[name], tensor) for name, tensor in frequencies.items())


def test_q4_0_is_that_of_gguf(model):
    changed = variants.with_q4_0_weights(model)
    name = next(name for name, module in model.named_modules() if name.endswith("down_proj"))
    before, after = (each.get_submodule(name).weight.detach() for each in (model, changed))
    kind = gguf.GGMLQuantizationType.Q4_0
    told = gguf.quants.dequantize(gguf.quants.quantize(before.float().numpy(), kind), kind)
    # The reference is in fp64, where a weight may fall on the other side of a step.
    off = np.abs(after.numpy() - told) > 1e-6
    assert off.mean() < 1e-3
    head, kept = (each.get_output_embeddings().weight for each in (model, changed))
    assert torch.equal(head, kept)


def test_q4_0_takes_a_block_of_zeros():
    layer = torch.nn.Linear(32, 1)
    layer.weight.data.zero_()
    tiny = torch.nn.Sequential(layer)
    tiny.get_output_embeddings = lambda: None
    assert not variants.with_q4_0_weights(tiny)[0].weight.any()
