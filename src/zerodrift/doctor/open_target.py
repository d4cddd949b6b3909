"""Which kind of configuration was handed to us? Told by its shape; what fits none is refused with what there is."""

from collections.abc import Callable
from pathlib import Path

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.launch_line import find_launch
from zerodrift.doctor.secrets import safe
from zerodrift.doctor.setting import FileKind, Target
from zerodrift.doctor.table_files import SkyRlFile, VerlFile
from zerodrift.doctor.tables import file_names, vllm_options
from zerodrift.doctor.trainer_files import TRL_TOO, PipelineRlFile, TrlFile
from zerodrift.doctor.trl_serve import find_trl_serve
from zerodrift.doctor.vllm_file import VllmFile
from zerodrift.doctor.yaml_text import YamlText, read_text
from zerodrift.doctor.zerodrift_file import ZerodriftFile, is_ours

_OF_OTHERS = {
    "NeMo-RL": {"policy", "grpo"},
    "prime-rl": {"orchestrator", "inference"},
}
"""Keys at the top of files that other trainers read."""


def is_url(text: str) -> bool:
    """Whether a server is meant."""
    return text.startswith(("http://", "https://"))


def open_target(text: str, kind: FileKind | None = None) -> Target:
    """A command line, or the file at that path; servers are opened by `server`."""
    if not text.strip():
        raise ConfigError("there is nothing to judge; give a URL, a vLLM command in quotes, or a YAML file")
    if _names_a_file(text):
        content = read_text(Path(text))
        is_script = text.endswith((".sh", ".bash", ".slurm", ".sbatch")) or content.startswith("#!")
        return _command(content) if is_script else open_text(content, text, kind)
    if _is_there(text, Path.is_dir):
        raise ConfigError(
            f'{safe(text)!r} is a directory; give the command that serves it ("vllm serve {safe(text)} …"), or a file'
        )
    if " " not in text.strip():
        raise ConfigError(
            f"{safe(text)!r} is neither a URL (http://…), nor a file, nor a command; put a command in quotes"
        )
    return _command(text)


def _command(text: str) -> Target:
    """A launch of a trainer, of vLLM by a trainer's command, or of vLLM alone."""
    return find_launch(text) or find_trl_serve(text) or CommandLine(text)


def open_text(text: str, source: str, kind: FileKind | None) -> Target:
    """The text of a YAML file; `source` names it in errors."""
    document = YamlText(text, source)
    kinds: dict[FileKind, Callable[[YamlText], Target]] = {
        FileKind.VLLM: VllmFile,
        FileKind.TRL: TrlFile,
        FileKind.PIPELINERL: PipelineRlFile,
        FileKind.VERL: VerlFile,
        FileKind.SKYRL: SkyRlFile,
        FileKind.ZERODRIFT: ZerodriftFile,
    }
    return kinds[kind or _kind(document)](document)


def _names_a_file(text: str) -> bool:
    """A command has blanks, and files rarely; a YAML file that is not there is a file all the same."""
    return _is_there(text, Path.is_file) or (" " not in text and text.endswith((".yaml", ".yml")))


def _is_there(text: str, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(Path(text))
    except (OSError, ValueError):  # a command may be longer than any name
        return False


def _kind(document: YamlText) -> FileKind:
    values = document.values
    if is_ours(values):
        return FileKind.ZERODRIFT
    sections = {key for key, value in values.items() if isinstance(value, dict)}
    # Before PipelineRL, because a Hydra file of theirs may list `defaults` as well.
    if "actor_rollout_ref" in sections:
        return FileKind.VERL
    if {"generator", "trainer"} <= sections:
        return FileKind.SKYRL
    if sections & {"vllm_config", "finetune", "actor"} or isinstance(values.get("defaults"), list):
        return FileKind.PIPELINERL
    # `seed`, `dtype` and a few others are keys of both: whose keys are more?
    options = vllm_options().names
    of_vllm = sum(str(key).replace("_", "-") in options for key in values)
    trl_keys = {name.path for name in file_names("trl").values()} | TRL_TOO
    of_trl = sum(key in trl_keys or str(key).startswith("vllm_") for key in values)
    if not of_vllm and not of_trl:
        for framework, keys in _OF_OTHERS.items():
            if keys <= values.keys():
                raise ConfigError(
                    f"{document.source} is a configuration of {framework} ({', '.join(sorted(keys))}), which is not read "
                    "here; give the vLLM command that it starts, or the server (http://HOST:PORT) once it runs"
                )
        raise ConfigError(
            f"{document.source} is no configuration of vLLM, TRL, PipelineRL, verl, SkyRL or zerodrift that can be told by its "
            f"keys; say which with --kind {'|'.join(FileKind)}"
        )
    return FileKind.VLLM if of_vllm > of_trl else FileKind.TRL
