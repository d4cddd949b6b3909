"""A built-in model as checkpoints that releases of transformers from before 5 read as well.

    python tests/older_checkpoint.py .cache/v0-v1

writes two, with the same weights and a tokenizer in the old words:

- `qwen3`: the base of the rotary embedding stands in config.json in the old word (`rope_theta`) and in the new one.
- `qwen3-new-config`: in the new one alone (`rope_parameters`), as transformers 5 writes it.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from zerodrift import models

MODEL = "testbed:qwen3"
BOTH, NEW_ALONE = "qwen3", "qwen3-new-config"


def write(root: Path) -> dict[str, Path]:
    """Both below `root`, by their names; what lies there already is written anew."""
    found = {}
    for name in (BOTH, NEW_ALONE):
        shutil.rmtree(root / name, ignore_errors=True)
        directory = found[name] = models.materialise(MODEL, root / name)
        _edit(directory / "tokenizer_config.json", _old_words)
        _edit(directory / "config.json", _both_words if name == BOTH else _new_words)
    return found


def _edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _old_words(tokenizer: dict[str, Any]) -> None:
    """The class has had this name since 4.0, and the list of tokens another one until 5."""
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")


def _new_words(config: dict[str, Any]) -> None:
    config["torch_dtype"] = config["dtype"]


def _both_words(config: dict[str, Any]) -> None:
    _new_words(config)
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]


if __name__ == "__main__":
    for directory in write(Path(sys.argv[1])).values():
        sys.stdout.write(f"{directory}\n")
