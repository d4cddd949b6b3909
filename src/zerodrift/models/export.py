"""Write a built-in model as a Hugging Face directory, so that a real engine can serve exactly those weights."""

import json
import tempfile
from pathlib import Path

from zerodrift.core.errors import ModelNotFound
from zerodrift.models import testbed, tokenizer_testbed
from zerodrift.models.loading import dtype_of
from zerodrift.models.quiet import quiet
from zerodrift.models.spec import TESTBED_PREFIX, builtin_name
from zerodrift.models.testbed_config import BOS_ID, EOS_ID
from zerodrift.models.warmup import warm_up

# Nothing that an engine could take for a sampling default.
_GENERATION_CONFIG = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}


def materialise(
    spec: str | Path, directory: str | Path, dtype: str = "float32", *, warmup: bool = False
) -> Path:
    """Write "testbed:NAME" into `directory`, which `load` reads back bit for bit. Returns the directory.

    `warmup` first teaches it to add single digits. Files already there are replaced by new ones, never written
    into: an engine that still maps the old weights keeps them.
    """
    name = builtin_name(spec)
    if name is None:
        raise ModelNotFound(
            f"{spec} is a directory already; only built-ins ({TESTBED_PREFIX}NAME) are written"
        )
    torch_dtype = dtype_of(dtype)
    model, tokenizer = testbed.build(name), tokenizer_testbed.build(name)
    if warmup:
        warm_up(model, tokenizer)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".writing-") as scratch, quiet():
        model.to(torch_dtype).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (Path(scratch) / "generation_config.json").write_text(json.dumps(_GENERATION_CONFIG, indent=2) + "\n")
        for path in sorted(Path(scratch).iterdir()):
            path.replace(target / path.name)
    return target
