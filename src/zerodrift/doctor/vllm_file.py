"""The file of `vllm serve --config`: flags as keys, with what vLLM makes of them, its surprise included.

vLLM turns `false` into `--no-KEY` and drops the line where there is no such flag. Flags are spelled with hyphens, so
`enable_prefix_caching: false` is dropped, and caching stays on.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import secret_arguments, vllm_refusals, vllm_settings, vllm_words
from zerodrift.doctor.setting import Origin, Setting, Value
from zerodrift.doctor.tables import VLLM_VERSION, VllmName, vllm_names, vllm_options
from zerodrift.doctor.target import Reading
from zerodrift.doctor.vllm_arguments import parse
from zerodrift.doctor.yaml_text import YamlText


class VllmFile:
    """Keys with hyphens or underscores, values as the flags take them."""

    title = f"vLLM configuration file, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        words = as_words(text.values)
        self.parsed, self._strays = secret_arguments.apart(parse(words), words)

    @classmethod
    def of(cls, path: Path) -> "VllmFile":
        """The file at `path`."""
        return cls(YamlText(read_text(path), str(path)))

    @property
    def model(self) -> str | None:
        """As the file names it."""
        found = self.parsed.last("model")
        return found.value if found else None

    @property
    def dropped(self) -> list[str]:
        """Keys of lines that vLLM drops."""
        return [
            key
            for key, value in self._text.values.items()
            if value is False and "_" in str(key) and _hyphens(key) in vllm_options().switches
        ]

    def _without_effect(self) -> list[object]:
        switches = vllm_options().switches
        return [
            key
            for key, value in self._text.values.items()
            if value is False and _hyphens(key) not in switches
        ]

    def read(self) -> Reading:
        """Without the lines that vLLM drops."""
        taken = vllm_refusals.without_refused(self.parsed)
        found = vllm_settings.settings(taken, {}, self.model)
        strays = [f"a word behind --{secret.name} belongs to no flag" for secret in self._strays.values()]
        found["refused"] = vllm_refusals.setting(
            [*map(vllm_refusals.refusal, self.parsed.arguments), *strays]
        )
        found["dropped_lines"] = Setting("dropped_lines", ", ".join(self.dropped) or None, Origin.SET)
        # `false` where there is no --no- form is dropped as well, and nothing would have come of it.
        nothing = [f"{key}: false, which vLLM drops" for key in self._without_effect()]
        return Reading(found, (*vllm_settings.not_judged(taken), *nothing))

    def typed(self, name: str, value: Value) -> str | None:
        """A line of the file, or a variable for the command that reads it."""
        if name == "dropped_lines":
            return ", ".join(f"{_hyphens(key)}: false" for key in self.dropped) or None
        spec = vllm_names().get(name)
        if spec is None or spec.env is not None:
            return None if spec is None else f"{spec.env}={vllm_words.plain(value)} before the command"
        if value is None:
            return f"remove {spec.flag}"
        spec = vllm_settings.inside(spec, self.parsed) or spec
        return f"{spec.flag}: {_line(spec.key, value)}"

    def changed(self, changes: Mapping[str, Value]) -> str:
        """The file with these settings; variables have no place in it."""
        text = self._text
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if name == "dropped_lines":
                for key in VllmFile(text).dropped:
                    text = text.renamed([key], _hyphens(key))
            elif spec is not None and spec.flag is not None:
                text = _with(text, vllm_settings.inside(spec, self.parsed) or spec, value)
        return text.without_secrets()


def as_words(values: Mapping[Any, Any]) -> list[str]:
    """The words that vLLM makes of the keys of its file."""
    words: list[str] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is not text; keys are flags of vLLM without their dashes")
        if isinstance(value, bool):
            if value:
                words.append(f"--{key}")
            elif key in vllm_options().switches:
                words.append(f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [f"--{key}={json.dumps(value)}"]
        else:
            words += [f"--{key}={value}"]
    return words


def read_text(path: Path) -> str:
    """The text of a file that a user named."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as text ({error}); a configuration is a UTF-8 file"
        ) from error


def _with(text: YamlText, spec: VllmName, value: Value) -> YamlText:
    assert spec.flag is not None, "variables have no place in a file"
    flags = (spec.flag, *spec.also)
    spellings = [name for name in text.values if isinstance(name, str) and _hyphens(name) in flags]
    if value is None:
        for name in spellings:
            text = text.without([name])
        return text
    if spec.key is not None:
        return _with_key(text, spec.flag, spec.key, value, spellings)
    if not spellings:
        return text.with_value([spec.flag], value)
    text = text.with_value(spellings[-1:], value)
    # Under a key with underscores `false` would be dropped.
    return text.renamed(spellings[-1:], spec.flag) if value is False else text


def _with_key(text: YamlText, flag: str, key: str, value: Value, spellings: list[str]) -> YamlText:
    """A key below the flag: behind a dot, in a JSON between quotes, or in a section."""
    dotted = [name for name in text.values if _hyphens(name) == _hyphens(f"{flag}.{key}")]
    if dotted:
        return text.with_value(dotted[-1:], value)
    place = spellings[-1:] or [flag]
    if isinstance(quoted := text.values.get(place[0]), str):
        return text.with_value(place, json.dumps({**json.loads(quoted), key: value}))
    return text.with_value([*place, key], value)


def _line(key: str | None, value: Value) -> str:
    written = json.dumps(value) if isinstance(value, bool) else str(value)
    return written if key is None else f"{{{key}: {written}}}"


def _hyphens(key: object) -> str:
    return str(key).replace("_", "-")
