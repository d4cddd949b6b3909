"""A configuration of our own: the engine that an audit starts, and how it samples."""

import json
from collections.abc import Mapping

import msgspec

from zerodrift.backends.vllm_launch import DEFAULTS, check_overrides
from zerodrift.config.keys import check_keys
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import checkpoint, file_settings, vllm_refusals, vllm_settings
from zerodrift.doctor.setting import Origin, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, file_names
from zerodrift.doctor.target import Reading
from zerodrift.doctor.vllm_arguments import parse
from zerodrift.doctor.yaml_text import YamlText
from zerodrift.models.spec import TESTBED_PREFIX

VLLM = "vllm"


class ZerodriftFile:
    """Checked as every configuration is: a key that means nothing is refused."""

    title = f"zerodrift configuration, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        check_keys(text.values, RunConfig, text.source)
        try:
            self._config = msgspec.convert(text.values, RunConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{text.source}: {error}") from error
        self._names = file_names("zerodrift")

    def read(self) -> Reading:
        """Sampling always; what logprobs mean where zerodrift starts the engine, all its settings where that is vLLM."""
        asked = {name: self._asked(name) for name in self._names}
        sampling = {
            name: setting
            for name, setting in asked.items()
            if setting is not None and self._names[name].path.startswith("sampling_defaults")
        }
        engine = self._config.engine
        if engine.url is not None:
            return Reading(sampling, (f"engine.url: ask it with zerodrift doctor {engine.url}",))
        if engine.name != VLLM:
            # What its logprobs mean is asked of every engine; the rest are flags of vLLM.
            mode = asked["logprobs_mode"]
            return Reading(
                sampling | ({} if mode is None else {mode.name: mode}), (f"engine.name: {engine.name}",)
            )
        check_overrides(engine)
        written = parse(list(engine.args))
        parsed = vllm_refusals.without_refused(written)
        # Those of the CPU backend are set wherever the engine runs, and say nothing about where that is.
        on_cpu = vllm_settings.device(engine.env).value == "cpu"
        env = {name: value for name, value in DEFAULTS.items() if on_cpu or not name.startswith("VLLM_CPU_")}
        env |= engine.env
        found = vllm_settings.settings(parsed, env, self._config.model.path, asked.get)
        if checkpoint.NAME in found and _is_built_in(self._config.model.path):
            found["quantization"] = Setting("quantization", None, Origin.FRAMEWORK)
            del found[checkpoint.NAME]
        found["host"] = Setting("host", "127.0.0.1", Origin.FRAMEWORK)
        stops = vllm_refusals.of_variables(engine.env)
        if engine.args or stops:
            found["refused"] = vllm_refusals.setting([*map(vllm_refusals.refusal, written.arguments), *stops])
        return Reading(sampling | found, tuple(vllm_settings.not_judged(parsed)))

    def typed(self, name: str, value: Value) -> str | None:
        """As `--set` takes it."""
        if name not in self._names:
            return None
        spec = self._names[name]
        return f"{spec.path}={json.dumps(file_settings.value_in_file(spec, value)).strip(chr(34))}"

    def changed(self, changes: Mapping[str, Value]) -> str:
        """The file with these settings."""
        return file_settings.changed(self._text, self._names, changes).without_secrets()

    def _asked(self, name: str) -> Setting | None:
        """What the configuration asks for; None where it leaves it to the engine."""
        spec = self._names[name]
        value: object = self._config
        for key in spec.path.split("."):
            value = getattr(value, key)
        if value is None:
            return None
        written = self._text.get(spec.path.split("."))[0]
        meant = spec.values.get(value, value) if isinstance(value, str) else value
        return Setting(name, file_settings.plain(meant), Origin.SET if written else Origin.DEFAULT)


def _is_built_in(model: str | None) -> bool:
    """Whether we write the checkpoint ourselves, before the engine starts."""
    return model is None or model.startswith(TESTBED_PREFIX)


def is_ours(values: Mapping[object, object]) -> bool:
    """Sections of a RunConfig, and nothing else."""
    sections = set(RunConfig.__struct_fields__)
    return set(values) <= sections and all(isinstance(value, dict) for value in values.values())
