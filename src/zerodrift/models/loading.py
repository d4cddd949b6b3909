"""Turn a model's name into a model or a tokenizer, once its directory is known to be safe.

What comes back owns its memory: `transformers` hands out tensors that are views of the mapped weight file, and
overwriting that file (as trainers do) would change a model already loaded.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zerodrift.core.errors import InvalidValue, ModelError, UnsupportedModel
from zerodrift.models import directory as model_directory
from zerodrift.models import testbed, tokenizer_testbed
from zerodrift.models.first_calls import settle_first_calls
from zerodrift.models.quiet import quiet
from zerodrift.models.spec import builtin_name, directory_of

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
AS_SAVED = "as-saved"
"""The checkpoint's own dtype; of a built-in model, float32."""


def load(spec: str | Path, dtype: str = "float32") -> PreTrainedModel:
    """The model that `spec` names ("testbed:NAME" or a directory), in eval mode, with `dtype` parameters."""
    settle_first_calls()
    if (name := builtin_name(spec)) is not None:
        return testbed.build(name, torch.float32 if dtype == AS_SAVED else dtype_of(dtype))
    return _load_directory(directory_of(spec), "auto" if dtype == AS_SAVED else dtype_of(dtype))


def tokenizer(spec: str | Path) -> Any:
    """The fast tokenizer of "testbed:NAME" or of a directory, with its chat template where it has one."""
    if (name := builtin_name(spec)) is not None:
        return tokenizer_testbed.build(name)
    directory = directory_of(spec)
    model_directory.check_tokenizer(directory)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a vendor raises, it comes out as one of ours
        raise ModelError(f"transformers cannot read the tokenizer in {directory}: {error}") from error


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of one of the names that are accepted everywhere."""
    if name not in DTYPES:
        raise InvalidValue(f"dtype is {name!r}; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _load_directory(directory: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    _check_architecture(model_directory.check(directory))
    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **testbed.EXPERTS,
                ignore_mismatched_sizes=True,  # reported with the rest, and refused below by name
            )
    except Exception as error:  # as above
        raise ModelError(f"transformers cannot load {directory}: {error}") from error
    _check_report(directory, report)
    _check_values(directory, model)
    _own_memory(model)
    return model.eval()


def _check_architecture(config: dict[str, Any]) -> None:
    architecture = model_directory.architecture_of(config)
    model_type = config.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if known != architecture:
        raise UnsupportedModel(
            f"config.json names {architecture} of model_type {model_type!r}, and the causal language model that "
            f"transformers has for it is {known}; only those are loaded"
        )


def _check_report(directory: Path, report: dict[str, Any]) -> None:
    """Every tensor of the model came from the files, and every tensor of the files went into the model."""
    for key, what in (
        ("missing_keys", "lacks tensors that the model has"),
        ("unexpected_keys", "has tensors that the model lacks"),
        ("mismatched_keys", "has tensors of another shape than the model's"),
    ):
        if names := sorted(map(str, report[key])):
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise ModelError(
                f"{directory} {what}: {shown}; config.json and the weights do not belong together"
            )


def _check_values(directory: Path, model: PreTrainedModel) -> None:
    """A damaged file must not become a policy: every parameter is a finite floating-point number."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ModelError(f"{directory}: {name} is {parameter.dtype}; weights are floating-point numbers")
        # A sum is finite exactly where its terms are, short of an overflow that no weights come near.
        if not bool(parameter.detach().double().sum().isfinite()):
            raise ModelError(f"{directory}: {name} holds NaN or an infinity; copy or download it again")


def _own_memory(model: PreTrainedModel) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
