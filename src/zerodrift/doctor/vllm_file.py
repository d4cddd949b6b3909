"""The file of `vllm serve --config`: flags as keys, with what vLLM makes of them, its surprise included.

vLLM turns `false` into `--no-KEY` and drops the line where there is no such flag. Flags are spelled with hyphens, so
`enable_prefix_caching: false` is dropped, and caching stays on.
"""

import json
from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import listed, secrets, vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, vllm_names, vllm_options
from zerodrift.doctor.vllm_flags import parse, refusals, refused, typed
from zerodrift.doctor.yaml_text import YamlText


class VllmFile:
    """Keys with hyphens or underscores, values as the flags take them."""

    title = f"vLLM configuration file, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        self.parsed = parse(_words(text.values))

    @property
    def model(self) -> str | None:
        """As the file names it."""
        found = self.parsed.last("model")
        return found.value if found else None

    @property
    def dropped(self) -> list[str]:
        """Keys of lines that vLLM drops."""
        return [key for key in self._false() if "_" in key and _hyphens(key) in vllm_options().switches]

    def read(self) -> Reading:
        """Without the lines that vLLM drops."""
        taken = self.parsed.taken()
        found = vllm_settings.settings(taken, {}, self.model)
        found["refused"] = refused(refusals(self.parsed))
        found["dropped_lines"] = Setting("dropped_lines", ", ".join(self.dropped) or None, Origin.SET)
        # `false` where there is no --no- form is dropped as well, and nothing would have come of it.
        nothing = [key for key in self._false() if _hyphens(key) not in vllm_options().switches]
        return Reading(
            found,
            (*vllm_settings.not_judged(taken), *(f"{key}: false, which vLLM drops" for key in nothing)),
        )

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
        inner = spec.inner if spec.inner and self.parsed.inside(spec) else spec
        return f"{inner.flag}: {written if inner.key is None else f'{{{inner.key}: {written}}}'}"

    def corrected(self, changes: Mapping[str, Value]) -> "VllmFile | None":
        """Lines changed where they stand; variables have no place here, and a JSON is left to its owner."""
        values: dict[tuple[str, ...], Value] = {}
        renamed = {key: _hyphens(key) for key in self.dropped if "dropped_lines" in changes}
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if spec is None or spec.flag is None or spec.key or self.parsed.inside(spec):
                continue
            flags = (spec.flag, *spec.also)
            there = [key for key in self._text.values if isinstance(key, str) and _hyphens(key) in flags]
            if value is None:
                values |= {(key,): None for key in there}
                continue
            if value is False and there and "_" in there[-1]:  # it would be dropped
                renamed[there[-1]] = spec.flag
            values[(renamed.get(there[-1], there[-1]) if there else spec.flag,)] = value
        text = self._text.with_values(values, renamed)
        return None if text is None else VllmFile(text)

    def printed(self) -> str:
        """The file without secrets, and without what is no flag of vLLM."""
        return self._text.printed(listed.unlisted_in_flags)

    @property
    def hides(self) -> bool:
        """Whether something in it is not printed."""
        return self.printed() != self._text.text

    def _false(self) -> list[str]:
        return [str(key) for key, value in self._text.values.items() if value is False]


def _words(values: Mapping[Any, Any]) -> list[str]:
    """The words that vLLM makes of the keys of its file."""
    words: list[str] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"the key {secrets.safe(repr(key))} is not text; keys are flags of vLLM without their dashes"
            )
        if secrets.names_a_secret(key) and value not in (None, "", True, False):
            words.append(f"--{key}={secrets.HIDDEN}")  # it matters only that it is there
        elif value is True:
            words.append(f"--{key}")
        elif value is False:
            words += [f"--no-{key}"] if key in vllm_options().switches else []
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words.append(f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return words


def _hyphens(key: object) -> str:
    return str(key).replace("_", "-")
