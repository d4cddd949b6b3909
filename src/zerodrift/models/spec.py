"""What does a model's name mean: a built-in, or a directory? Anything else is refused, nothing is downloaded."""

import difflib
from pathlib import Path

from zerodrift.core.errors import InvalidValue, ModelNotFound
from zerodrift.models.testbed_config import CONFIGS

TESTBED_PREFIX = "testbed:"


def builtin_name(spec: str | Path) -> str | None:
    """NAME of "testbed:NAME", or None where `spec` is a path. An unknown NAME raises."""
    if not isinstance(spec, (str, Path)):
        raise InvalidValue(f"a model is named by {spec!r}; give a directory, or a built-in: {_builtin()}")
    text = str(spec)
    if not text.startswith(TESTBED_PREFIX):
        return None
    name = text.removeprefix(TESTBED_PREFIX)
    if name not in CONFIGS:
        raise ModelNotFound(f"there is no built-in model {text!r}{_nearest(text)}; there are: {_builtin()}")
    return name


def directory_of(spec: str | Path) -> Path:
    """The directory that `spec` names; it exists."""
    directory = Path(spec)
    if directory.is_dir():
        return directory
    if directory.suffix == ".gguf" and directory.exists():
        raise ModelNotFound(
            f"{directory} is what llama.cpp serves (--engine llama-cpp); name the checkpoint that it is compared with: "
            "--set validation.reference_model=DIRECTORY"
        )
    if directory.exists():
        raise ModelNotFound(
            f"{directory} is a file; give the directory that holds it beside config.json and the tokenizer"
        )
    raise ModelNotFound(
        f"there is no directory {str(directory)!r}{_nearest(str(spec))}; give a directory with config.json, "
        f"tokenizer and safetensors weights (`hf download ORG/NAME --local-dir DIR`), or a built-in: {_builtin()}"
    )


def _builtin() -> str:
    return ", ".join(TESTBED_PREFIX + name for name in CONFIGS)


def _nearest(text: str) -> str:
    candidates = [TESTBED_PREFIX + name for name in CONFIGS]
    bare = text.lower().removeprefix(TESTBED_PREFIX)
    near = [TESTBED_PREFIX + bare] if bare in CONFIGS else difflib.get_close_matches(text, candidates, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
