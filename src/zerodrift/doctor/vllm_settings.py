"""From flags and environment variables of a vLLM server to settings in force: what is written, else the default."""

from collections.abc import Callable, Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import checkpoint
from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.tables import UNWRITTEN, VllmName, vllm_names, vllm_options
from zerodrift.doctor.vllm_flags import Argument, Parsed, number, variable_refusal

Default = Callable[[str], Setting | None]
"""What somebody between vLLM and the user sets where the user does not; None leaves it to vLLM."""
READ_TOO = frozenset(["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"])
"""Variables that are judged together with others."""
_NOT_LISTED = frozenset({"model", "port", "served-model-name", "config", "uds"})
"""Say where and what, not how; nothing to list."""
_NOTHING = ("", "None", "null")
"""What vLLM reads as if the flag were not there; the second is what `key: null` of a file becomes."""


def settings(
    parsed: Parsed, env: Mapping[str, str], model: str | None, otherwise: Default = lambda _: None
) -> dict[str, Setting]:
    """Everything that is judged about a vLLM server started so."""
    found = {"device": device(env)}
    for name, spec in vllm_names().items():
        written = _from_env(name, spec, env) if spec.env else _from_flags(name, spec, parsed, env)
        found[name] = written or otherwise(name) or _default(name, spec, found["device"].value)
        if spec.only not in (None, found["device"].value) and found[name].origin is Origin.DEFAULT:
            del found[name]  # means nothing elsewhere
    if found["device"].value == "cpu":
        found["cpu_threads"] = cpu_threads(env)
    if parsed.last("uds") is not None:
        found["host"] = Setting("host", "unix socket", Origin.SET)
    elif found["host"].known and found["host"].value is None:
        found["host"] = _default("host", vllm_names()["host"], found["device"].value)
    elsewhere = parsed.last("hf-config-path")
    place = elsewhere.value if elsewhere and elsewhere.value not in _NOTHING else model
    found[checkpoint.DEFAULTS] = (
        unknown(checkpoint.DEFAULTS)
        if parsed.unseen(*checkpoint.DEFAULTS_FLAGS)
        else checkpoint.generation_defaults(
            found["generation_config"].value, place, parsed.json("override-generation-config") or {}
        )
    )
    if found["quantization"].known and found["quantization"].value is None:
        visible = None if parsed.unseen(*checkpoint.FLAGS) else place
        overridden = parsed.json("hf-overrides") or {}
        found["quantization"] = checkpoint.quantization(visible, overridden)
        if not found["quantization"].known and not checkpoint.is_suspicious(place, overridden):
            found[checkpoint.NAME] = unknown(checkpoint.NAME)
    return found


def not_judged(parsed: Parsed) -> list[str]:
    """Flags that no rule reads, cannot be seen, or do not exist; nothing of what a user wrote is passed over."""
    judged = {flag for spec in vllm_names().values() for flag in (spec.flag, *spec.also)} | _NOT_LISTED
    for spec in vllm_names().values():  # a JSON that holds nothing else
        if spec.inner and set(parsed.json(spec.inner[0]) or ()) == {spec.inner[1]}:
            judged.add(spec.inner[0])
    there = {spec.flag for spec in vllm_names().values() if spec.kind in ("presence", "secret")}
    lines = []
    for each in parsed.arguments:
        if not each.known and each.name not in there:
            lines.append(f"--{each.name}: its value comes from a variable that is not known here")
        elif each.name not in judged:
            known = each.name in vllm_options().names
            lines.append(f"--{each.name}" if known or each.refusal is None else each.refusal)
    return list(dict.fromkeys(lines))


def device(env: Mapping[str, str]) -> Setting:
    """CPU where variables of the CPU backend are set, CUDA where devices are chosen; a command does not say."""
    if any(name.startswith("VLLM_CPU_") for name in env):
        return Setting("device", "cpu", Origin.SET)
    if env.get("CUDA_VISIBLE_DEVICES"):
        return Setting("device", "cuda", Origin.SET)
    return unknown("device")


def cpu_threads(env: Mapping[str, str]) -> Setting:
    """How many threads each worker on CPU computes with.

    vLLM overwrites OMP_NUM_THREADS with the number of cores that it binds a worker to, unless told not to bind.
    """
    threads = env.get("OMP_NUM_THREADS", "")
    if env.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind" and threads.isdecimal():
        return Setting("cpu_threads", int(threads), Origin.SET)
    return unknown("cpu_threads")


def variable(spec: VllmName, text: str) -> Value:
    """What a variable says that vLLM does not refuse."""
    if spec.kind == "switch" and spec.words:
        return text.strip().lower() in ("1", "true")
    if spec.kind == "switch":
        return int(text) != 0
    return text.strip().upper() or None


def named(name: str, spec: VllmName, written: Mapping[str, Any]) -> str | None:
    """A structure by its keys. Of sampling defaults only those count that change the distribution."""
    keys = checkpoint.changing(written) if name == "override_generation_config" else written
    return ", ".join(str(key) for key in keys if key != spec.except_) or None


def _default(name: str, spec: VllmName, where: Value) -> Setting:
    value = False if spec.kind == "secret" else spec.default_on(where)
    return unknown(name) if value == UNWRITTEN else Setting(name, value, Origin.DEFAULT)


def _from_env(name: str, spec: VllmName, env: Mapping[str, str]) -> Setting | None:
    text = env.get(spec.env or "")
    if text is None:
        return None
    if "$" in text or variable_refusal(spec, text):
        return unknown(name)
    return Setting(name, variable(spec, text), Origin.SET)


def _from_flags(name: str, spec: VllmName, parsed: Parsed, env: Mapping[str, str]) -> Setting | None:
    if spec.kind == "secret":
        there = parsed.last(spec.flag) is not None or bool(env.get(spec.secret_env or ""))
        return Setting(name, value=True, origin=Origin.SET) if there else None
    if parsed.unseen(spec.flag) and spec.kind != "presence":  # of which it matters only that it is there
        return unknown(name)
    if spec.key is not None or spec.kind == "names":
        return _from_json(name, spec, parsed)
    if spec.inner is not None:
        return _flag_or_json(name, spec, parsed)
    given = [each for flag in (spec.flag, *spec.also) if (each := parsed.last(flag)) is not None]
    if not given:
        return None
    values = [_value(each, spec) for each in given]
    # One that says none does not undo another that has the same effect.
    return Setting(name, next((value for value in values if value is not None), None), Origin.SET)


def _value(argument: Argument, spec: VllmName) -> Value:
    match spec.kind:
        case "switch":
            # `=false` is refused by vLLM; a trainer's launcher may be kinder.
            return argument.on and argument.value.lower() not in ("false", "0")
        case "number":
            return number(argument.value)
        case "presence":
            there = argument.on and not (argument.values and argument.value in _NOTHING)
            return f"--{argument.name}" if there else None
    return None if argument.value.lower() in ("none", "null") else argument.value


def _from_json(name: str, spec: VllmName, parsed: Parsed) -> Setting | None:
    found = parsed.json(spec.flag)
    if found is None:
        return None
    written = named(name, spec, found) if spec.key is None else found.get(spec.key)
    # The flag replaces all that a file says below it, also what it leaves out.
    if written is None:
        return Setting(name, spec.default, Origin.DEFAULT)
    return Setting(name, str(written), Origin.SET)


def _flag_or_json(name: str, spec: VllmName, parsed: Parsed) -> Setting | None:
    """By the flag or inside a JSON, in capitals or not: vLLM takes either, and never both."""
    alone, inside = parsed.last(spec.flag), parsed.inside(spec)
    if alone is not None and inside is not None:
        raise ConfigError(f"vLLM refuses --{spec.flag} beside --{spec.inside}; take one of them out")
    if alone is None and spec.inner and parsed.unseen(spec.inner[0]):
        return unknown(name)
    written = inside if alone is None else alone.value
    if written is None:
        return None
    text = str(written).upper()
    return Setting(name, None if text in ("AUTO", "NONE", "NULL") else text, Origin.SET)
