"""What can be prepared, what is refused and by which name, and what a prepared model refuses to do."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact, models
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import InvalidValue, Unproven, UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.exact import interface, preparation
from zerodrift.exact.modules import ExactLinear, Pack
from zerodrift.exact.ops.cpu.op_set import CpuOps


@pytest.fixture
def model() -> Any:
    return models.load("testbed:llama")


def test_prepare_is_idempotent_and_keeps_names(model: Any) -> None:
    names = list(model.state_dict())
    assert exact.prepare(model) is model
    assert exact.prepare(model) is model
    assert list(model.state_dict()) == names
    assert isinstance(model.lm_head, ExactLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert exact.restore(exact.restore(model)) is model
    assert not any(isinstance(module, ExactLinear) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_packs_for_itself(model: Any) -> None:
    exact.prepare(model)
    other = copy.deepcopy(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids).logits
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(other(ids).logits, before)
        assert torch.equal(model(ids).logits, before)


def test_a_foreign_part_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=16, n_head=2, n_layer=1, vocab_size=50)
    with pytest.raises(UnsupportedModel, match="the model is a GPT2LMHeadModel"):
        exact.prepare(AutoModelForCausalLM.from_config(config))


def test_a_foreign_part_inside_is_refused_by_its_path(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj is a Bilinear"):
        exact.prepare(model)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [("hidden_act", "relu6", "relu6"), ("attention_dropout", 0.1, "set it to 0")],
)
def test_settings_that_cannot_be_exact_are_refused(
    model: Any, setting: str, value: Any, message: str
) -> None:
    setattr(model.config, setting, value)
    with pytest.raises(UnsupportedModel, match=message):
        exact.prepare(model)


SPOILS: Any = [
    lambda layer: setattr(layer.mlp.up_proj, "forward", layer.mlp.up_proj.forward),
    # What Module.compile sets.
    lambda layer: setattr(layer.mlp.up_proj, "_compiled_call_impl", layer.mlp.up_proj.forward),
    lambda layer: layer.mlp.up_proj.register_forward_hook(lambda *_: None),
    lambda layer: layer.mlp.up_proj.register_forward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_module_whose_class_does_not_say_what_it_computes_is_refused(model: Any, spoil: Any) -> None:
    spoil(model.model.layers[1])
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj"):
        exact.prepare(model)


class Rollout(NamedTuple):
    prompt_token_ids: tuple[int, ...] = (1, 2)
    token_ids: tuple[int, ...] = (3,)
    sampling: SamplingParams = SamplingParams()
    kind: LogprobKind = LogprobKind.RAW


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_prepared_model_that_is_hooked_or_patched_is_refused(model: Any, spoil: Any) -> None:
    exact.prepare(model)
    assert len(exact.token_logprobs(model, [Rollout()])) == 1
    spoil(model.model.layers[1])
    for use in (lambda: exact.token_logprobs(model, [Rollout()]), lambda: exact.prepare(model)):
        with pytest.raises(UnsupportedModel):
            use()


def test_hooks_that_ask_for_gradients_are_none_of_ours(model: Any) -> None:
    exact.prepare(model).enable_input_require_grads()
    assert exact.token_logprobs(model, [Rollout()])[0].requires_grad


def test_an_adapter_that_came_since_is_refused_until_it_is_prepared_too(model: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(exact.prepare(model), peft.LoraConfig(target_modules=["q_proj"]))
    for part in (adapted, model):
        with pytest.raises(UnsupportedModel):
            exact.token_logprobs(part, [Rollout()])
    assert exact.prepare(adapted) is adapted
    assert len(exact.token_logprobs(adapted, [Rollout()])) == 1
    merged = adapted.merge_and_unload()
    exact.restore(merged)
    assert exact.prepare(merged) is model


def test_a_head_that_does_more_than_its_family_says_is_refused(model: Any) -> None:
    kind = type(model)

    def forward(self: Any, **inputs: Any) -> Any:
        output = kind.forward(self, **inputs)
        output.logits = output.logits * 2
        return output

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    with pytest.raises(UnsupportedModel, match="lm_head"):
        exact.prepare(model)


def test_other_dtypes_and_devices_are_refused(model: Any) -> None:
    # What a user writes to have it otherwise is named: in a file there is no `load`.
    with pytest.raises(UnsupportedModel, match=r"torch\.bfloat16.*computes in torch\.float32.*model\.dtype"):
        exact.prepare(copy.deepcopy(model).bfloat16())
    with pytest.raises(UnsupportedModel, match="meta"):
        exact.prepare(copy.deepcopy(model).to("meta"))


def test_a_model_that_fails_the_proof_is_given_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Unproven("no")

    monkeypatch.setattr(CpuOps, "prove", fail)
    with pytest.raises(Unproven):
        exact.prepare(model)
    assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(UnsupportedModel, match="not prepared"):
        preparation.ops_of(model)


def test_mixed_precision_is_refused_where_it_reaches_a_weight(model: Any) -> None:
    exact.prepare(model)
    with pytest.raises(UnsupportedModel, match="mixed precision"), torch.no_grad():
        model.bfloat16()(torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedModel, match="mixes none"):
        model.float().lm_head(torch.zeros(1, 256, dtype=torch.bfloat16))


def test_packing_follows_the_weight() -> None:
    made: list[int] = []

    class Counting(CpuOps):
        def pack(self, weight_NK: torch.Tensor) -> torch.Tensor:
            made.append(1)
            return weight_NK.detach().clone()

    pack, weight = Pack(Counting()), torch.nn.Parameter(torch.randn(3, 2))
    with torch.no_grad():
        pack.of(weight)
        pack.of(weight)
        assert len(made) == 1
        weight.mul_(2)
        assert torch.equal(pack.of(weight), weight)
    assert len(made) == 2
    pack.of(weight)
    assert len(made) == 2
    pack.drop()
    pack.of(weight)
    assert len(made) == 3


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "write", [lambda w: w.mul_(2), lambda w: w.copy_(w.flip(0)), lambda w: w.copy_(w.flip(1))]
)
def test_packing_follows_what_torch_does_not_count(gradients: bool, write: Any) -> None:
    """An RL trainer scores under no_grad first after a step, and FSDP2 gathers into the memory of before."""
    pack, weight = Pack(CpuOps()), torch.nn.Parameter(torch.randn(4, 3))
    other = Pack(CpuOps())
    with torch.set_grad_enabled(gradients):
        before = pack.of(weight).to_dense()
        write(weight.data)
        found = pack.of(weight).to_dense()
        assert torch.equal(found, other.of(weight).to_dense())
        assert not torch.equal(found, before)


def test_frozen_weights_are_not_looked_at(model: Any) -> None:
    linear = preparation.freeze_weights(exact.prepare(model)).model.layers[0].mlp.up_proj
    packed = linear.exact_pack.of(linear.weight)
    linear.weight.data.mul_(2)
    assert linear.exact_pack.of(linear.weight) is packed
    exact.refresh(model)
    assert linear.exact_pack.of(linear.weight) is not packed


def test_positions_that_are_written_over_are_read_again(model: Any) -> None:
    """A trainer may keep one buffer for the positions of every packed row."""
    prepared, ids = exact.prepare(model), torch.tensor([[5, 6, 7, 8, 9, 10]])
    buffer, other = torch.tensor([[0, 1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        prepared(input_ids=ids, position_ids=buffer, use_cache=False)
        expected = prepared(input_ids=ids, position_ids=other, use_cache=False).logits
        prepared(input_ids=ids, position_ids=buffer, use_cache=False)
        buffer.copy_(other)
        found = prepared(input_ids=ids, position_ids=buffer, use_cache=False).logits
    assert torch.equal(found, expected)


def positions(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_where_sequences_lie() -> None:
    of = interface.segments_of
    assert of(None, None, (2, 3)) == ((0, 3), (3, 6))
    assert of(positions([0, 1, 0, 1, 2, 0]), None, (1, 6)) == ((0, 2, 5), (2, 5, 6))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert of(positions([0, 0, 1], [0, 1, 2]), mask, (2, 3)) == ((1, 3), (3, 6))
    assert of(positions([0, 1, 2]), torch.tensor([[1, 1, 0]]), (1, 3)) == ((0,), (2,))


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (positions([1, 2, 3]), None),
        (positions([0, 1, 3]), None),
        (positions([0, 1, 2]), torch.tensor([[0, 1, 1]])),
        (positions([0, 1, 2]), torch.tensor([[1, 0, 1]])),
    ],
)
def test_sequences_that_do_not_start_at_zero_are_refused(
    ids: torch.Tensor, mask: torch.Tensor | None
) -> None:
    with pytest.raises(UnsupportedModel, match="sequences start at position 0"):
        interface.segments_of(ids, mask, (1, 3))


def test_what_a_prepared_model_cannot_do(model: Any) -> None:
    exact.prepare(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedModel, match="no KV cache"), torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(UnsupportedModel, match="4 dimensions"):
        model(ids, attention_mask=torch.ones(1, 1, 3, 3))
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(UnsupportedModel, match="dropout"):
        model(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bounds": (0, 2, 2)}, "at least one token"),
        ({"bounds": (0, 3)}, "bounds"),
        ({"tables": (torch.tensor([0]),)}, "covers 4"),
        ({"positions_T": torch.tensor([0])}, "1 positions"),
        ({"firsts": ()}, "0 first positions"),
    ],
)
def test_impossible_batches_are_refused(model: Any, changes: dict[str, Any], message: str) -> None:
    exact.prepare(model)
    kv = exact.PagedKV(model, 3, 4)
    fine = exact.PagedBatch(
        torch.tensor([1, 2]),
        torch.tensor([3, 4]),
        torch.tensor([3, 4]),
        (0, 2),
        (3,),
        (torch.tensor([0, 1]),),
    )
    with pytest.raises(InvalidValue, match=message):
        exact.forward_paged(model, fine._replace(**changes), kv)


def test_the_cache_is_as_large_as_arithmetic_says(model: Any) -> None:
    kv = exact.PagedKV(model, 10, 16)
    assert kv.nbytes == 2 * 2 * 10 * 16 * 2 * 64 * 4
    kv.layers[1][0][3] = 7
    kv.copy_block(3, 4)
    assert torch.equal(kv.layers[1][0][4], kv.layers[1][0][3])
    for blocks, size in ((0, 16), (4, 0)):
        with pytest.raises(InvalidValue, match="at least one block"):
            exact.PagedKV(model, blocks, size)


def test_the_fingerprint_says_what_decides_the_bits(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="not prepared"):
        exact.numeric_fingerprint(model)
    fingerprint = exact.numeric_fingerprint(exact.prepare(model))
    assert all(isinstance(value, str) and value for value in fingerprint.values())
    assert fingerprint["attention"] == "blocks-64-global-max"
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert exact.numeric_fingerprint(model) == fingerprint
    torch.set_num_threads(before)
    plain = exact.prepare(models.load("testbed:llama"), plain=frozenset({"linear"}))
    assert exact.numeric_fingerprint(plain) != fingerprint


def test_stop_ids_come_from_the_generation_config(model: Any) -> None:
    from zerodrift.exact.fingerprint import stop_ids_of

    assert stop_ids_of(model) == (1,)
    model.generation_config.eos_token_id = [1, 3]
    assert stop_ids_of(model) == (1, 3)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert stop_ids_of(model) == ()


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = exact.nothing
    assert exact.forward_paged is not None
