"""A built-in model as checkpoints that releases of transformers from before 5 read as well.

    python tests/older_checkpoint.py .cache/v0-v1

writes two, with the same weights and a tokenizer in the old words:

- `qwen3`: the base of the rotary embedding stands in config.json in the old word (`rope_theta`) and in the new one.
- `qwen3-new-config`: in the new one alone (`rope_parameters`), as transformers 5 writes it.
"""

import shutil
import sys
from pathlib import Path

from zerodrift.models import materialise
from zerodrift.models.older_words import config_in_new_words, edit, tokenizer_in_old_words, write_for_all

MODEL = "testbed:qwen3"
BOTH, NEW_ALONE = "qwen3", "qwen3-new-config"


def write(root: Path) -> dict[str, Path]:
    """Both below `root`, by their names; what lies there already is written anew."""
    found = {name: root / name for name in (BOTH, NEW_ALONE)}
    for directory in found.values():
        shutil.rmtree(directory, ignore_errors=True)
    write_for_all(MODEL, found[BOTH])
    new = materialise(MODEL, found[NEW_ALONE])
    edit(new / "tokenizer_config.json", tokenizer_in_old_words)
    edit(new / "config.json", config_in_new_words)
    return found


if __name__ == "__main__":
    for directory in write(Path(sys.argv[1])).values():
        sys.stdout.write(f"{directory}\n")
