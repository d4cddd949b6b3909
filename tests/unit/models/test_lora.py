import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.core.errors import InvalidValue, ModelError, UnsupportedModel
from zerodrift.models import lora

MODEL = "testbed:llama"
IDS_1L = torch.tensor([[0, 5, 6, 7, 8, 9]])
Edit = Callable[[dict[str, Any]], None]


def by_peft(directory: Path, **options: Any) -> Any:
    """A model with an adapter that does something, made and saved by the library that trainers use."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], **{"r": 4, "lora_alpha": 12, **options})
    # peft draws lora_A from the global generator: one adapter in some was 1.1e-5 off where 1e-5 is allowed.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = peft.get_peft_model(models.load(MODEL), config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS_1L).logits
    return found


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"r": 1, "lora_alpha": 1}])
def test_computes_what_peft_computes(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = logits(by_peft(tmp_path, **options))
    ours = logits(lora.attach(models.load(MODEL), tmp_path))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - logits(models.load(MODEL))).abs().max() > 0.01


def test_is_the_merged_model_up_to_rounding(tmp_path: Path) -> None:
    merged = by_peft(tmp_path).merge_and_unload()
    beside = lora.attach(models.load(MODEL), tmp_path)
    torch.testing.assert_close(logits(beside), logits(merged), rtol=0, atol=1e-5)


def test_the_base_keeps_its_dtype_and_the_adapter_its_precision(tmp_path: Path) -> None:
    by_peft(tmp_path)
    model = lora.attach(models.load(MODEL, "bfloat16"), tmp_path)
    adapted = model.model.layers[0].self_attn.q_proj
    assert adapted.up_OR.dtype is torch.float32
    assert adapted(torch.ones(1, adapted.base.in_features, dtype=torch.bfloat16)).dtype is torch.bfloat16


def edited_config(directory: Path, **changes: Any) -> None:
    path = directory / lora.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"peft_type": "IA3"},
        {"r": 0},
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    by_peft(tmp_path)
    edited_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel):
        lora.attach(models.load(MODEL), tmp_path)


def _rename(tensors: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.pop(f"{Q}.lora_B.weight"),
        lambda t: t[f"{Q}.lora_B.weight"].fill_(torch.nan),
        lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 3)}),
        lambda t: t.clear(),
        lambda t: _rename(t, "layers.0.", "layers.99."),
        lambda t: _rename(t, "layers.0.self_attn.q_proj", "norm"),
        lambda t: t.update({"base_model.model.x.bias": torch.ones(1)}),
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, edit: Edit) -> None:
    by_peft(tmp_path)
    tensors = load_file(tmp_path / lora.WEIGHTS)
    edit(tensors)
    save_file(tensors, tmp_path / lora.WEIGHTS)
    with pytest.raises(ModelError):
        lora.attach(models.load(MODEL), tmp_path)


def test_no_adapter_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        lora.attach(models.load(MODEL), tmp_path / "none")
    with pytest.raises(ModelError, match="adapter_config"):
        lora.attach(models.load(MODEL), tmp_path)
    by_peft(tmp_path)
    (tmp_path / lora.WEIGHTS).unlink()
    with pytest.raises(ModelError):
        lora.attach(models.load(MODEL), tmp_path)
    edited_config(tmp_path, r="many")
    with pytest.raises(ModelError):
        lora.attach(models.load(MODEL), tmp_path)
