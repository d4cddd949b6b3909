"""How a setting of vLLM is typed on a command line."""

import json
import shlex

from zerodrift.doctor.setting import Value
from zerodrift.doctor.tables import VllmName, vllm_names

REMOVE = "remove"


def typed(name: str, value: Value) -> str | None:
    """Flag or variable, ready to be copied; None where vLLM has no such setting."""
    spec = vllm_names().get(name)
    if spec is None:
        return None
    if spec.env is not None:
        return f"{spec.env}={plain(value)}"
    if value is None or (spec.kind == "presence" and not value):
        return f"{REMOVE} --{spec.flag}"
    return " ".join(words(spec, value))


def words(spec: VllmName, value: Value) -> list[str]:
    """A flag with its value, quoted for the shell."""
    if isinstance(value, bool):
        return [f"--{spec.flag}" if value else f"--no-{spec.flag}"]
    if spec.key is not None:
        return [f"--{spec.flag}", shlex.quote(json.dumps({spec.key: value}, separators=(",", ":")))]
    return [f"--{spec.flag}", shlex.quote(plain(value))]


def plain(value: Value) -> str:
    """A value as the shell writes it; variables of vLLM are integers."""
    return str(int(value)) if isinstance(value, bool) else str(value)
