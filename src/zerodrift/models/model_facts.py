"""What must be known of a model before it is loaded: sizes, special ids, window, sampling defaults. Torch-free.

Read from config.json and generation_config.json as written. A default that is not written there is filled in only
for the families whose default is known (a test compares them with `transformers`); otherwise it is refused.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec

from zerodrift.core.errors import ModelError, UnsupportedModel
from zerodrift.core.frozen import FrozenFacts
from zerodrift.models import directory as model_directory
from zerodrift.models.spec import TESTBED_PREFIX, builtin_name, directory_of
from zerodrift.models.testbed_config import CONFIGS

# What vLLM takes from generation_config.json unless told otherwise (`--generation-config vllm`).
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")

FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False, "use_sliding_window": False},
    "qwen3": {"tie_word_embeddings": False, "use_sliding_window": False, "head_dim": 128},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 4096},
}
"""Defaults of the config classes, for keys that config.json may leave out."""


_READ_KEYS = (
    "vocab_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "head_dim",
    "tie_word_embeddings",
    "sliding_window",
)
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Under which of these a context is written: MPT says the second, released Bloom models the third."""
UNLIMITED_CONTEXT = 8192
"""Prompt and output of a model that has no longest context: a state-space model, or one with ALiBi (Bloom). A limit for
prompts is needed all the same, and the engine's own holds beside it."""

SAVE_TEXT = (
    "whole = AutoModelForCausalLM.from_pretrained(DIR); "
    "text = AutoModelForCausalLM.from_config(whole.config.get_text_config(), dtype=whole.dtype); "
    "text.model.load_state_dict(whole.get_decoder().state_dict()); "
    "text.lm_head.load_state_dict(whole.lm_head.state_dict()); "
    "text.save_pretrained(NEW)"
)
"""Python, which a test runs. (`Gemma3ForCausalLM.from_pretrained` of the whole warns, and draws random weights.)"""


class ModelFacts(FrozenFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as its files describe it."""

    name: str
    """`testbed:NAME`, or the directory's own name."""
    architecture: str
    vocab_size: int
    context_length: Annotated[int, msgspec.Meta(ge=1)]
    """Positions that the model was made for; prompt and output together."""
    eos_token_ids: tuple[int, ...]
    """As `generate` takes them: from generation_config.json, else from config.json."""
    bos_token_id: int | None
    num_layers: int
    head_dim: int | None
    """None where a model has no attention heads."""
    tied_head: bool
    """The head is the transposed embedding, and has no tensor of its own."""
    sliding_window: int | None
    """Positions that a token attends to; None where it attends to all before it."""
    generation_defaults: Mapping[str, float | int]
    """Sampling parameters in generation_config.json, which engines apply to requests that leave them out."""


def facts(spec: str | Path) -> ModelFacts:
    """Facts of "testbed:NAME" or of a model directory, without loading weights."""
    if (name := builtin_name(spec)) is not None:
        return facts_from(TESTBED_PREFIX + name, CONFIGS[name], {})
    directory = directory_of(spec)
    model_directory.check_contained(directory)
    config = model_directory.read_config(directory)
    generation = directory / "generation_config.json"
    return facts_from(
        directory.resolve().name,
        config,
        model_directory.read_json(generation) if generation.is_file() else {},
    )


def facts_from(name: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
    """Facts from the two files' contents."""
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{name} is an encoder with a decoder (model_type {config.get('model_type')!r}); zerodrift judges causal language "
            "models, whose every token follows from those before it"
        )
    if isinstance(config.get("text_config"), Mapping):
        raise UnsupportedModel(
            f"{name} is a language model inside another (model_type {config.get('model_type')!r} with a text_config); save "
            f"its text part by itself and audit that, with the tokenizer's files beside it, while the engine may serve the whole: {SAVE_TEXT}"
        )
    settings = _with_defaults(config)
    _require_written(settings)
    values = {
        "name": name,
        "architecture": model_directory.architecture_of(config),
        "vocab_size": settings["vocab_size"],
        "context_length": settings["max_position_embeddings"],
        "eos_token_ids": _ids(generation.get("eos_token_id"), settings.get("eos_token_id")),
        "bos_token_id": settings.get("bos_token_id"),
        "num_layers": settings["num_hidden_layers"],
        "head_dim": _head_dim(settings),
        "tied_head": settings["tie_word_embeddings"],
        "sliding_window": _sliding_window(settings),
        "generation_defaults": {
            key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None
        },
    }
    try:
        return msgspec.convert(values, ModelFacts)
    except msgspec.ValidationError as error:
        raise ModelError(f"the configuration of {name} cannot be true: {error}") from error


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys under the names used here, those left out filled in by what the family's config class says."""
    defaults = FAMILY_DEFAULTS.get(str(config.get("model_type")))
    return {**(_as_transformers_reads(config) if defaults is None else defaults), **config}


def _as_transformers_reads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a family that is not known here, where transformers is installed: GPT-2 says n_positions, and so on."""
    try:
        auto = import_module("transformers").AutoConfig
        read = auto.for_model(**config)
    except Exception:
        return {}
    found = {key: value for key in _READ_KEYS if (value := getattr(read, key, None)) is not None}
    lengths = [value for key in _LENGTHS if _is_length(value := getattr(read, key, None))]
    found["max_position_embeddings"] = lengths[0] if lengths else UNLIMITED_CONTEXT
    return found if "num_attention_heads" in found else {**found, "state_space": True}


def _is_length(value: Any) -> bool:
    """XLNet writes -1 for none."""
    return isinstance(value, int) and value > 0


def _require_written(settings: Mapping[str, Any]) -> None:
    """All that is missing at once: who writes one key should not be sent back for the next."""
    needed = ["vocab_size", "max_position_embeddings", "num_hidden_layers", "tie_word_embeddings"]
    if settings.get("head_dim") is None and not settings.get("state_space"):
        needed += ["hidden_size", "num_attention_heads"]
    if missing := [key for key in needed if settings.get(key) is None]:
        raise UnsupportedModel(
            f"config.json of model_type {settings.get('model_type')!r} does not say {', '.join(missing)}, and defaults are "
            f"known here only for {', '.join(FAMILY_DEFAULTS)}, or where transformers knows the type; write what is "
            "missing into config.json, if this is a causal language model at all"
        )


def _head_dim(settings: Mapping[str, Any]) -> Any:
    # null in config.json means hidden_size / heads, except where the family has a default of its own.
    if settings.get("head_dim") is not None:
        return settings["head_dim"]
    if settings.get("state_space"):
        return None
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ModelError(
            f"config.json has hidden_size={hidden!r} and num_attention_heads={heads!r}; no head_dim fits"
        )
    return hidden // heads


def _ids(*candidates: Any) -> Any:
    written = next((value for value in candidates if value is not None), ())
    return [written] if isinstance(written, int) else written


def _sliding_window(settings: Mapping[str, Any]) -> Any:
    layers = settings.get("layer_types")
    windowed = settings.get("use_sliding_window", True) and (layers is None or "sliding_attention" in layers)
    return settings.get("sliding_window") if windowed else None
