"""A built-in model in words that releases of transformers from before 5 read as well.

Old releases of an engine come with old releases of transformers, which take what they do not find for its default and
say nothing: a rotary base in the new word alone is another model there (docs/v0-v1.md).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerodrift.models.export import materialise


def write_for_all(spec: str, directory: Path) -> Path:
    """The model in old and new words."""
    materialise(spec, directory)
    edit(directory / "tokenizer_config.json", tokenizer_in_old_words)
    edit(directory / "config.json", config_in_both)
    return directory


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def tokenizer_in_old_words(tokenizer: dict[str, Any]) -> None:
    """The class has had this name since 4.0, and the list of tokens another one until 5."""
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")


def config_in_both(config: dict[str, Any]) -> None:
    """As `config_in_new_words`, and the rotary base where it was looked for before 5."""
    config_in_new_words(config)
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]


def config_in_new_words(config: dict[str, Any]) -> None:
    """The dtype alone in both: older releases would load the weights in another one."""
    config["torch_dtype"] = config["dtype"]
