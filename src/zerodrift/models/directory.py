"""Is a model directory safe to open? Answered before a vendor library sees it. Torch-free.

Reading weights must run no code and read no file outside the directory. `transformers` 5.22 follows `../` and
absolute paths in the shard index, takes another weight file where config.json names one, and looks for adapters
and remote code; each of these is refused here by name.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.core.errors import ModelError, NoWeights, TruncatedWeights, UnsafePath, UnsupportedModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20
"""The largest tokenizer.json in use is 33 MB."""

# Only these are read, so only these must stay inside.
_TEMPLATES = "additional_chat_templates"
_READ_SUFFIXES = frozenset({".json", ".jinja", ".safetensors", ".model", ".txt"})

REFUSED_KEYS: Mapping[str, str] = {
    "auto_map": "it would run Python code from the model directory",
    "quantization_config": "the reference is the unquantised policy; dequantise the checkpoint first",
    "transformers_weights": f"it loads another file than {WEIGHTS}; rename the file instead",
    "fusion_config": "it replaces the model's own operations",
    "attn_implementation": "it may name a kernel to download; the caller chooses the attention",
    "_attn_implementation": "it may name a kernel to download; the caller chooses the attention",
}

# Files that transformers would take in place of model.safetensors.
_DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def check(directory: Path) -> dict[str, Any]:
    """The directory's config, once everything in it that will be read is known to be safe and whole."""
    check_contained(directory)
    config = read_config(directory)
    shapes(directory)
    return config


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor in the weight files, by name; read off their headers."""
    return {name: shape for path in weight_files(directory) for name, shape in shapes_in(path).items()}


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor in one safetensors file, which is whole: its tensors cover it without gap or overlap.

    That is a matter of the header. A flipped bit in the data passes here, and is found by the manifest in `weights`.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (optional, and doctor comes by here)

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise TruncatedWeights(
            f"{path}, {path.stat().st_size} bytes, is damaged ({error}); copy or download it again"
        ) from error


def check_contained(directory: Path) -> None:
    """Nothing that will be read is a link to somewhere else."""
    for path in (*directory.iterdir(), *(directory / _TEMPLATES).glob("*")):
        if path.suffix in _READ_SUFFIXES or path.name == _TEMPLATES:
            _require_inside(directory, path, f"{path} is a link")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, which asks for nothing that is refused."""
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"{directory} holds an adapter, not a model; merge it into its base and save that"
        )
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{directory} has no config.json, so its architecture is unknown")
    config = read_json(directory / "config.json")
    _refuse_keys(config, directory / "config.json", REFUSED_KEYS)
    architecture_of(config)
    return config


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one class that config.json names."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModel(
            f"config.json has architectures={names!r}; one is needed, as ['LlamaForCausalLM']"
        )
    return names[0]


def check_tokenizer(directory: Path) -> None:
    """The tokenizer is data (tokenizer.json), and runs no code."""
    check_contained(directory)
    if not (directory / "tokenizer.json").is_file():
        raise UnsupportedModel(
            f"{directory} has no tokenizer.json; copy the one of the checkpoint that it was made from, or write one with transformers: "
            f"AutoTokenizer.from_pretrained('ORG/NAME').save_pretrained({str(directory)!r})"
        )
    settings = directory / "tokenizer_config.json"
    if settings.is_file():
        _refuse_keys(read_json(settings), settings, {"auto_map": REFUSED_KEYS["auto_map"]})


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model, all of them inside the directory."""
    names = sorted(path.name for path in directory.iterdir())
    if shards := [name for name in names if _DISTRIBUTED_SHARD.fullmatch(name)]:
        raise UnsupportedModel(
            f"{directory} is a distributed checkpoint ({shards[0]}, …); consolidate it into {WEIGHTS} first"
        )
    if WEIGHTS in names:
        return (directory / WEIGHTS,)
    if INDEX in names:
        return _indexed_files(directory)
    pickles = [name for name in names if Path(name).suffix in {".bin", ".pt", ".pth"}]
    found = (
        f"; {', '.join(pickles)} are pickles, which run code when read, and are refused" if pickles else ""
    )
    raise NoWeights(
        f"{directory} has neither {WEIGHTS} nor {INDEX}{found}. Save the model with "
        "`model.save_pretrained(DIR)`, which writes safetensors"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ModelError(f"{path} has {size} bytes; JSON files over {MAX_JSON_BYTES} are refused")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, and an object is needed")
    return value


def _indexed_files(directory: Path) -> tuple[Path, ...]:
    index = directory / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise NoWeights(f"{index} has no weight_map, so no tensor has a file; download it again")
    files = []
    for name in sorted(set(map(str, weight_map.values()))):
        # A shard lies beside its index; anything longer than a file name is a way out.
        if name in {"", ".", ".."} or Path(name).name != name or "\\" in name:
            raise UnsafePath(
                f"{index} names the shard {name!r}; a shard is a file name in {directory}, nothing else"
            )
        path = directory / name
        _require_inside(directory, path, f"{index} names the shard {name!r}")
        if path.suffix != ".safetensors":
            raise NoWeights(
                f"{index} names the shard {name!r}; only .safetensors files are read, never pickles"
            )
        if not path.is_file():
            raise NoWeights(f"{index} names the shard {name!r}, which is not there; download it again")
        files.append(path)
    return tuple(files)


def _require_inside(directory: Path, path: Path, what: str) -> None:
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in _roots(directory)):
        raise UnsafePath(
            f"{what} which leads to {target}, outside {directory}; copy the file into the directory"
        )


def _roots(directory: Path) -> tuple[Path, ...]:
    resolved = directory.resolve()
    repository = resolved.parent.parent
    # The hub's cache keeps snapshots/REVISION/FILE as links to blobs/HASH of the same repository.
    if resolved.parent.name == "snapshots" and repository.name.startswith("models--"):
        return (resolved, repository / "blobs")
    return (resolved,)


def _refuse_keys(settings: Mapping[str, Any], path: Path, reasons: Mapping[str, str]) -> None:
    for key, reason in reasons.items():
        if settings.get(key) is not None:
            raise UnsupportedModel(f"{path} has {key}={str(settings[key])[:80]}; {reason}")
