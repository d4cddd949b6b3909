"""The file of `vllm serve --config`: flags as keys, with what vLLM makes of them, its surprise included.

vLLM turns `false` into `--no-KEY` and drops the line where there is no such flag. Flags are spelled with hyphens, so
`enable_prefix_caching: false` is dropped, and caching stays on.
"""

import json
from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.core.secrets import names_a_secret
from zerodrift.doctor import checkpoint, secrets, vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, vllm_names, vllm_options
from zerodrift.doctor.vllm_flags import parse, refused, typed
from zerodrift.doctor.yaml_text import YamlText


class VllmFile:
    """Keys with hyphens or underscores, values as the flags take them."""

    title = f"vLLM configuration file, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        self.parsed = parse(_words(text.values))
        model = self.parsed.last("model")
        self.model = model.value if model else None
        false = [str(key) for key, value in text.values.items() if value is False]
        self.dropped = [key for key in false if "_" in key and _hyphens(key) in vllm_options().switches]
        """Keys of lines that vLLM drops."""
        # `false` where there is no --no- form is dropped as well, and nothing would have come of it.
        self._nothing = [key for key in false if _hyphens(key) not in vllm_options().switches]

    def read(self) -> Reading:
        """Without the lines that vLLM drops."""
        taken = self.parsed.taken()
        found = vllm_settings.settings(taken, {}, self.model)
        found["refused"] = refused(self.parsed, {})
        found["dropped_lines"] = Setting("dropped_lines", ", ".join(self.dropped) or None, Origin.SET)
        nothing = (f"{key}: false, which vLLM drops" for key in self._nothing)
        missing = checkpoint.missing(self.model)
        return Reading(found, (*missing, *vllm_settings.not_judged(taken), *nothing))

    def typed(self, name: str, value: Value) -> str | None:
        """A line of the file, or a variable for the command that reads it."""
        if name == "dropped_lines":
            return ", ".join(f"{_hyphens(key)}: false" for key in self.dropped) or None
        spec = vllm_names().get(name)
        if spec is None or spec.env is not None:
            return None if spec is None else f"{typed(name, value)} before the command"
        if value is None:
            return f"remove {spec.flag}"
        written = json.dumps(value) if isinstance(value, bool) else str(value)
        flag, key = spec.flag, spec.key
        if spec.inner and self.parsed.inside(spec) is not None:
            flag, key = spec.inner
        return f"{flag}: {written if key is None else f'{{{key}: {written}}}'}"

    def corrected(self, changes: Mapping[str, Value]) -> "VllmFile | None":
        """Lines changed where they stand; variables have no place here, and a JSON is left to its owner."""
        values: dict[tuple[str, ...], Value] = {}
        renamed = {key: _hyphens(key) for key in self.dropped if "dropped_lines" in changes}
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if spec is None or spec.flag is None or spec.key or self.parsed.inside(spec) is not None:
                continue
            there = [key for key in self._text.values if _hyphens(key) in (spec.flag, *spec.also)]
            if value is False:  # below a key with underscores it would be dropped
                renamed |= {key: spec.flag for key in there if "_" in key}
            if value is None:
                values |= {(key,): None for key in there}
            else:
                values[(renamed.get(there[-1], there[-1]) if there else spec.flag,)] = value
        text = self._text.with_values(values, renamed)
        return None if text is None else VllmFile(text)

    def printed(self) -> str:
        """The file without secrets."""
        return self._text.printed()


def _words(values: Mapping[Any, Any]) -> list[str]:
    """The words that vLLM makes of the keys of its file."""
    words: list[str] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"the key {secrets.safe(repr(key))} is not text; keys are flags of vLLM without their dashes"
            )
        if names_a_secret(key) and value not in (None, "", True, False):
            words.append(f"--{key}={secrets.HIDDEN}")  # it matters only that it is there
        elif isinstance(value, bool):
            words += [f"--{key}"] if value else [f"--no-{key}"] if key in vllm_options().switches else []
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words.append(f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return words


def _hyphens(key: object) -> str:
    return str(key).replace("_", "-")
