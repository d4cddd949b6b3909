"""A configuration of our own: the engine that an audit starts or asks, and how it samples."""

from collections.abc import Mapping

import msgspec

from zerodrift.backends.vllm_launch import DEFAULTS, check_overrides
from zerodrift.config.keys import check_keys
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import checkpoint, secrets, vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, unknown
from zerodrift.doctor.tables import VLLM_VERSION
from zerodrift.doctor.trainer_files import SettingsFile, plain
from zerodrift.doctor.vllm_flags import parse, refused
from zerodrift.doctor.yaml_text import YamlText
from zerodrift.models.spec import TESTBED_PREFIX

VLLM = "vllm"
RUNNING = "running_server"
"""Unknown where a file names a server, which was not asked."""


class ZerodriftFile(SettingsFile):
    """Checked as every configuration is: a key that means nothing is refused."""

    title = f"zerodrift configuration, defaults of vLLM {VLLM_VERSION}"

    framework = "zerodrift"

    def __init__(self, text: YamlText) -> None:
        super().__init__(text)
        check_keys(text.values, RunConfig, text.source)
        try:
            self._config = msgspec.convert(text.values, RunConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{text.source}: {error}") from error

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
            sampling[RUNNING] = unknown(RUNNING)
            return Reading(sampling, self._of_another_start(), server=secrets.safe(engine.url))
        if engine.name != VLLM:
            # What its logprobs mean is asked of every engine; the rest are flags of vLLM.
            mode = asked["logprobs_mode"]
            return Reading(
                sampling | ({} if mode is None else {mode.name: mode}), (f"engine.name: {engine.name}",)
            )
        check_overrides(engine)
        written = parse(list(engine.args))
        parsed = written.taken()
        # Those of the CPU backend are set wherever the engine runs, and say nothing about where that is.
        on_cpu = vllm_settings.device(engine.env).value == "cpu"
        env = {name: value for name, value in DEFAULTS.items() if on_cpu or not name.startswith("VLLM_CPU_")}
        model = self._config.model.path
        found = vllm_settings.settings(parsed, {**env, **engine.env}, model, asked.get)
        if not found["quantization"].known and (model is None or model.startswith(TESTBED_PREFIX)):
            # We write this checkpoint ourselves, before the engine starts.
            found["quantization"] = Setting("quantization", None, Origin.FRAMEWORK)
            found.pop(checkpoint.NAME, None)
        found["host"] = Setting("host", "127.0.0.1", Origin.FRAMEWORK)
        refusal = refused(written, engine.env)
        if engine.args or refusal.value:
            found["refused"] = refusal
        return Reading(sampling | found, tuple(vllm_settings.not_judged(parsed)))

    def _of_another_start(self) -> tuple[str, ...]:
        """Settings that only a start would use, where the server runs already and has its own."""
        paths = [spec.path for spec in self._names.values() if spec.path.startswith("engine.")]
        written = [path for path in paths if self._text.get(path.split(".")) not in (msgspec.UNSET, None)]
        said = "for an engine that zerodrift starts; the one at engine.url runs already, with settings of its own"
        return (f"{', '.join(written)}: {said}",) if written else ()

    def _asked(self, name: str) -> Setting | None:
        """What the configuration asks for; None where it leaves it to the engine."""
        spec = self._names[name]
        value: object = self._config
        for key in spec.path.split("."):
            value = getattr(value, key)
        if value is None:
            return None
        written = self._text.get(spec.path.split(".")) is not msgspec.UNSET
        meant = spec.values.get(value, value) if isinstance(value, str) else value
        return Setting(name, plain(meant), Origin.SET if written else Origin.DEFAULT)


def is_ours(values: Mapping[object, object]) -> bool:
    """Sections of a RunConfig, and nothing else."""
    sections = set(RunConfig.__struct_fields__)
    return set(values) <= sections and all(isinstance(value, dict) for value in values.values())
