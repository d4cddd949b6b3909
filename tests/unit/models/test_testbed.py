import copy

import pytest
import torch

from zerodrift.models import testbed
from zerodrift.models.family.parts import ModelParts
from zerodrift.weights.digest import model_digest

# Weights are exact arithmetic on integers from a seeded generator: any machine, any torch.
GOLDEN_DIGESTS = {
    "llama": "b1008eac89dd7533803cd8067800c40e57424ea38e30321f79f49d6885ccdf43",
    "qwen2": "35165450ddb514a86f89c01ed3888fea6809c2871b826583a873b2810c167d52",
    "qwen3": "3f020beca5c756002971ab133fe0102bf9d601cb4f65d9841bdb96397df750ff",
    "mistral": "022759b631d2589bc19e0b10f742ea75ac31df1d1cd9a94a28584d4ae422ba41",
    "gemma3": "478d4a9f7a069bbc6ba2f734040283f96c78cd746ba46067354f1e127c4272a9",
    "qwen3-moe": "e67930288d49410a01e12a194d0d0968d6446be473ad32aa114b3207d66b37d9",
}


@torch.no_grad()
def logprobs(model, ids):
    return torch.log_softmax(model(ids).logits.double(), -1)


def mean_shift(model, other, ids):
    """Mean |Δ| of the logprob that each gives to the tokens of `ids`, from the 32nd on."""
    targets = ids[:, 33:, None]
    ours, theirs = (logprobs(each, ids)[:, 32:-1].gather(-1, targets) for each in (model, other))
    return (ours - theirs).abs().mean().item()


def test_weights_are_the_same_on_every_machine(name, model):
    assert model_digest(model) == GOLDEN_DIGESTS[name]


def test_the_global_generator_is_left_alone(name):
    before = torch.random.get_rng_state()
    testbed.build(name)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_is_in_eval_mode_and_can_learn(model):
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_no_weight_is_neutral(model):
    """A norm of ones or a bias of zeros could be dropped unnoticed."""
    for tensor_name, parameter in model.named_parameters():
        assert parameter.std() > 0.01, tensor_name
        assert parameter.isfinite().all(), tensor_name
    biases = [parameter for tensor_name, parameter in model.named_parameters() if "bias" in tensor_name]
    assert bool(biases) == (model.config.model_type == "qwen2")
    assert all((bias != 0).all() for bias in biases)


def test_entropy_is_between_one_and_two_nats(model, words):
    logprobs_BTV = logprobs(model, words(16, 128, seed=17))
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    assert 1.3 < entropy_BT.mean() < 1.7
    # Sure of some tokens, at a loss about others, as trained models are.
    assert entropy_BT.min() < 0.1
    assert entropy_BT.max() > 2.5


def test_sampled_text_keeps_its_entropy_and_does_not_repeat(model, words):
    prompts = words(4, 8, seed=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=True, top_k=0,
            eos_token_id=None,
        )  # fmt: skip
    logprobs_BTV = logprobs(model, ids[:, 8:])
    assert -(logprobs_BTV.exp() * logprobs_BTV).sum(-1).mean() > 1.0
    assert (ids[:, 9:] == ids[:, 8:-1]).double().mean() < 0.1
    assert ids[:, 8:].unique().numel() > 60


def test_every_tensor_matters_to_the_last_logits(model, words):
    ids = words(1, 80, seed=3)
    generator = torch.Generator().manual_seed(0)
    before = logprobs(model, ids)[:, -1]
    for tensor_name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            # Noise and not a factor: a norm behind a projection would undo a factor.
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
        moved = (logprobs(model, ids)[:, -1] - before).abs().max()
        assert moved > 1e-4, tensor_name
        with torch.no_grad():
            parameter.copy_(kept)
    assert torch.equal(logprobs(model, ids)[:, -1], before)


def test_a_token_far_back_matters(model, words):
    ids = words(8, 80, seed=4)
    changed = ids.clone()
    changed[:, 40] = (ids[:, 40] + 1) % 512
    moved = (logprobs(model, ids) - logprobs(model, changed)).abs()
    assert moved[:, :40].max() == 0
    assert moved[:, 60:].mean() > 0.02


def test_positions_matter(model, words):
    """One per cent on the rotary frequencies: far over rounding (2e-6), and over bfloat16's 0.03."""
    stretched = copy.deepcopy(model)
    for module, name in ModelParts(stretched).frequencies():
        getattr(module, name).mul_(0.99)
    assert mean_shift(model, stretched, words(4, 160, seed=5)) > 0.05


def test_only_relative_positions_matter(model, words):
    ids = words(2, 64, seed=6)
    with torch.no_grad():
        shifted = model(ids, position_ids=torch.arange(300, 364)[None]).logits.double()
    assert (torch.log_softmax(shifted, -1) - logprobs(model, ids)).abs().max() < 1e-3


def test_the_window_of_mistral_matters_from_its_edge_on(words):
    model = testbed.build("mistral")
    whole = copy.deepcopy(model)
    whole.config.sliding_window = 1024
    ids = words(4, 160, seed=7)
    moved = (logprobs(model, ids) - logprobs(whole, ids)).abs().amax((0, 2))
    assert moved[:64].max() < 1e-4
    assert moved[64:].min() > 0.01


def test_rounding_is_that_of_healthy_models(name, words):
    """float32 within 1e-5 of float64, and bfloat16 at the 0.01 to 0.05 nats that real engines show."""
    ids = words(4, 128, seed=8)
    single, double, half = (
        testbed.build(name, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    )
    tokens = torch.distributions.Categorical(logits=logprobs(double, ids)).logits.argmax(-1, keepdim=True)
    at = [logprobs(model, ids).gather(-1, tokens) for model in (single, double, half)]
    assert (at[0] - at[1]).abs().mean() < 1e-5
    assert 0.003 < (at[2] - at[1]).abs().mean() < 0.06


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_that_of_parameters_and_never_of_rotary_frequencies(dtype):
    model = testbed.build("llama", dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    # In bfloat16 they would put position 1000 off by several turns.
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
