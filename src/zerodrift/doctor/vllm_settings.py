"""From flags and environment variables of a vLLM server to settings in force: what is written, else the default."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import checkpoint, generation_defaults, vllm_refusals
from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.tables import UNWRITTEN, VllmName, vllm_names
from zerodrift.doctor.vllm_arguments import Argument, Parsed, in_force, number

Default = Callable[[str], Setting | None]
"""What somebody between vLLM and the user sets where the user does not; None leaves it to vLLM."""

NOT_JUDGED = frozenset({"model", "port", "served-model-name", "config"})
"""Say where and what, not how; nothing to list."""

NOTHING = ("", "None", "null")
"""What vLLM reads as if the flag were not there; the second is what `key: null` of a file becomes."""


def nothing(_name: str) -> None:
    """Nobody stands between vLLM and the user."""


def settings(
    parsed: Parsed, env: Mapping[str, str], model: str | None, otherwise: Default = nothing
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
    place = elsewhere.value if elsewhere and elsewhere.value not in NOTHING else model
    found["generation_defaults"] = generation_defaults.from_files(
        found["generation_config"].value, place, _json(parsed, "override-generation-config") or {}
    )
    if found["quantization"].known and found["quantization"].value is None:
        from_checkpoint(found, checkpoint.quantization(place, _json(parsed, "hf-overrides") or {}))
    return found


def from_checkpoint(found: dict[str, Setting], setting: Setting) -> None:
    """Leave a setting to the checkpoint, and say so where that cannot be read."""
    found[setting.name] = setting
    if not setting.known:
        found[checkpoint.NAME] = unknown(checkpoint.NAME)


def not_judged(parsed: Parsed, unseen: Collection[str] = ()) -> list[str]:
    """Flags that no rule reads, and flags that do not exist; nothing of what a user wrote is passed over.

    Values of the `unseen` are the shell's to know.
    """
    judged = {flag for spec in vllm_names().values() for flag in (spec.flag, *spec.also)}
    for spec in vllm_names().values():  # a JSON that holds nothing else
        inner = spec.inner
        if inner and (inner.flag in unseen or set(_json(parsed, inner.flag) or ()) == {inner.key}):
            judged.add(inner.flag)
    unknown_flags = parsed.unknown()
    unknown_names = {text.split()[0].lstrip("-") for text in unknown_flags}
    rest = dict.fromkeys(
        f"--{each.name}"
        for each in parsed.arguments
        if each.name not in judged | NOT_JUDGED | unknown_names | {"uds"}
    )
    return [*rest, *dict.fromkeys(unknown_flags)]


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
    overrides = name == "override_generation_config"
    keys = generation_defaults.changing(written) if overrides else written
    return ", ".join(str(key) for key in keys if key != spec.except_) or None


def _default(name: str, spec: VllmName, where: Value) -> Setting:
    value = spec.default_on(where)
    if spec.kind == "secret":
        value = False
    return unknown(name) if value == UNWRITTEN else Setting(name, value, Origin.DEFAULT)


def _from_env(name: str, spec: VllmName, env: Mapping[str, str]) -> Setting | None:
    text = env.get(spec.env or "")
    if text is None:
        return None
    if vllm_refusals.of_variable(spec, text):
        return unknown(name)
    return Setting(name, variable(spec, text), Origin.SET)


def _from_flags(name: str, spec: VllmName, parsed: Parsed, env: Mapping[str, str]) -> Setting | None:
    assert spec.flag is not None, f"{name} has neither flag nor variable"
    if spec.kind == "secret":
        there = parsed.last(spec.flag) is not None or bool(env.get(spec.secret_env or ""))
        return Setting(name, value=True, origin=Origin.SET) if there else None
    if spec.key is not None or spec.kind == "names":
        return _from_json(name, spec, parsed)
    if name == "attention_backend":
        return _attention_backend(name, spec, parsed)
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
            there = argument.on and not (argument.values and argument.value in NOTHING)
            return f"--{argument.name}" if there else None
    return None if argument.value.lower() in ("none", "null") else argument.value


def _from_json(name: str, spec: VllmName, parsed: Parsed) -> Setting | None:
    assert spec.flag is not None, f"{name} has no flag"
    found = _json(parsed, spec.flag)
    if found is None:
        return None
    if spec.key is not None:
        value = found.get(spec.key)
        written = None if value is None else str(value)
    else:
        written = named(name, spec, found)
    # The flag replaces all that a file says below it, also what it leaves out.
    return (
        Setting(name, spec.default, Origin.DEFAULT) if written is None else Setting(name, written, Origin.SET)
    )


def inside(spec: VllmName, parsed: Parsed) -> VllmName | None:
    """The setting as a key of the JSON that says it; None where none does."""
    inner = spec.inner
    return inner if inner is not None and inner.key in (_json(parsed, inner.flag) or {}) else None


def _attention_backend(name: str, spec: VllmName, parsed: Parsed) -> Setting | None:
    """By the flag or inside a JSON, in capitals or not: vLLM takes either, and never both."""
    alone, inner = parsed.last(spec.flag or ""), inside(spec, parsed)
    if alone is not None and inner is not None:
        raise ConfigError(f"vLLM refuses --{spec.flag} beside --{spec.inside}; take one of them out")
    written: object = alone.value if alone is not None else None
    if inner is not None:
        written = (_json(parsed, inner.flag) or {}).get(str(inner.key))
    if written is None:
        return None
    # The case of a variable of the shell is its name.
    text = str(written) if str(written).startswith("$") else str(written).upper()
    return Setting(name, None if text in ("AUTO", "NONE", "NULL") else text, Origin.SET)


def _json(parsed: Parsed, flag: str | None) -> dict[str, Any] | None:
    """The JSON in force of a flag that takes one; None where it is not given."""
    given = [argument for argument in parsed.arguments if argument.name == flag]
    return in_force(given) if given else None
