"""A vLLM command line: `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`, read and changed in place."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import vllm_settings, vllm_words
from zerodrift.doctor.secrets import VLLM_SECRETS, names_a_secret
from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.shell_words import Word, split
from zerodrift.doctor.tables import VLLM_VERSION, VllmName, vllm_names, vllm_options
from zerodrift.doctor.target import Reading
from zerodrift.doctor.vllm_arguments import Argument, mapping, parse
from zerodrift.doctor.vllm_file import VllmFile

MODULES = ("vllm.entrypoints.openai.api_server", "pipelinerl.entrypoints.run_vllm1")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_CONTINUED = re.compile(r"\\\n([ \t]*)")


class CommandLine:
    """One command, with the variables that stand before it."""

    title = f"vLLM command line, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._words = split(self.text)
        self._texts = [word.text for word in self._words]
        self._first = _behind_program(self._texts)
        self._parsed = parse(self._texts, self._first)
        self._env = self._assignments()

    @property
    def model(self) -> str | None:
        """The positional, or --model."""
        if self._parsed.positionals:
            return self._texts[self._parsed.positionals[0]]
        flag = self._parsed.last("model")
        return flag.value if flag else None

    def read(self) -> Reading:
        """Flags win over the file that --config names, and that over defaults."""
        config = self._parsed.last("config")
        file = VllmFile.of(Path(config.value)) if config else None
        written = file.read().settings if file else {}

        def from_file(name: str) -> Setting | None:
            setting = written.get(name)
            return setting if setting is not None and setting.origin is Origin.SET else None

        env = {name: self._texts[index].partition("=")[2] for name, index in self._env.items()}
        found = vllm_settings.settings(
            self._parsed, env, self.model or (file.model if file else None), from_file
        )
        for name, setting in found.items():
            if isinstance(setting.value, str) and setting.value.startswith("$"):
                found[name] = unknown(name)  # a variable of the shell
        dropped = [
            key for key in (file.dropped if file else ()) if self._parsed.last(key.replace("_", "-")) is None
        ]
        if file is not None:
            found["dropped_lines"] = Setting("dropped_lines", ", ".join(dropped) or None, Origin.SET)
        extra = [f"the word {self._texts[index]!r}" for index in self._parsed.positionals[1:]]
        variables = [name for name in self._env if name not in _judged_variables()]
        listed = [
            *vllm_settings.not_judged(self._parsed),
            *(file.read().not_judged if file else ()),
            *variables,
            *extra,
        ]
        return Reading(found, tuple(listed))

    def typed(self, name: str, value: Value) -> str | None:
        """As on the command line."""
        if name == "dropped_lines":
            return " ".join(f"--no-{key.replace('_', '-')}" for key in self._dropped({}))
        return vllm_words.typed(name, value)

    def changed(self, changes: Mapping[str, Value]) -> str:
        """Values replaced where they stand, new flags behind the last word, new variables before the program."""
        edits = self._hidden()
        appended: list[list[str]] = []
        variables: list[str] = []
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if name == "dropped_lines":
                appended += [[f"--no-{key.replace('_', '-')}"] for key in self._dropped(changes)]
            elif spec is None:
                continue
            elif spec.env is not None:
                self._set_variable(spec.env, vllm_words.plain(value), edits, variables)
            else:
                appended += self._set_flag(spec, value, edits)
        gap = self._gap()
        tail = "".join(gap + " ".join(words) for words in appended)
        end = self._words[-1].end
        edits[end, end] = tail
        if variables:
            where = self._words[self._program_start()].start
            edits[where, where] = "".join(f"{variable} " for variable in variables)
        return _applied(self.text, edits)

    def _dropped(self, changes: Mapping[str, Value]) -> list[str]:
        """Lines of the file that vLLM drops and that no other change writes."""
        value = self.read().settings["dropped_lines"].value
        flags = {spec.flag for name in changes if (spec := vllm_names().get(name)) is not None}
        return [key for key in str(value).split(", ") if key.replace("_", "-") not in flags]

    def _assignments(self) -> dict[str, int]:
        """Variables before the program, by name."""
        found = {}
        for index, text in enumerate(self._texts[: self._program_start()]):
            if match := _ASSIGNMENT.fullmatch(text):
                found[match[1]] = index
        return found

    def _program_start(self) -> int:
        """Index of the first word that is neither a variable nor `env`."""
        for index, text in enumerate(self._texts[: self._first]):
            if text != "env" and not _ASSIGNMENT.fullmatch(text):
                return index
        raise AssertionError("there is a program")

    def _gap(self) -> str:
        """What stands between two flags here: a blank, or a new line where the command is written so."""
        indents = _CONTINUED.findall(self.text)
        return f" \\\n{indents[-1]}" if indents else " "

    def _hidden(self) -> dict[tuple[int, int], str]:
        """Secrets by the variable that should hold them; one that comes from a variable already may stay."""
        edits: dict[tuple[int, int], str] = {}
        for name, index in self._env.items():
            word = self._words[index]
            if names_a_secret(name) and not word.text.partition("=")[2].startswith("$"):
                edits[word.start, word.end] = f'{name}="${name}"'
        known = vllm_options().names
        for argument in self._parsed.arguments:
            secret = argument.name in VLLM_SECRETS or (
                argument.name not in known and names_a_secret(argument.name)
            )
            if secret and argument.values and not argument.value.startswith("$"):
                variable = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}.get(argument.name)
                variable = variable or argument.name.replace("-", "_").upper()
                first, last = self._words[argument.first], self._words[argument.last]
                edits[first.start, last.end] = f'--{argument.name} "${variable}"'
        return edits

    def _set_variable(
        self, name: str, value: str, edits: dict[tuple[int, int], str], variables: list[str]
    ) -> None:
        if name in self._env:
            word = self._words[self._env[name]]
            edits[word.start, word.end] = f"{name}={value}"
        else:
            variables.append(f"{name}={value}")

    def _set_flag(self, spec: VllmName, value: Value, edits: dict[tuple[int, int], str]) -> list[list[str]]:
        """Change the flag where it stands; what has to be appended is returned."""
        flags = (spec.flag, *spec.also)
        there = [each for each in self._parsed.arguments if each.name in flags]
        if value is None or (spec.kind == "presence" and not value):
            for argument in there:
                edits[self._words[argument.first - 1].end, self._words[argument.last].end] = ""
            return []
        if not there:
            return [vllm_words.words(spec, value)]
        if spec.key is not None and (dotted := [each for each in there if each.key]):
            # Dotted forms undo a whole JSON, so that one more of them is the only way in.
            there = [each for each in dotted if each.key == spec.key]
            if not there:
                return [[f"--{spec.flag}.{spec.key}", shlex.quote(vllm_words.plain(value))]]
        self._replace(there[-1], spec, value, edits)
        return []

    def _replace(
        self, argument: Argument, spec: VllmName, value: Value, edits: dict[tuple[int, int], str]
    ) -> None:
        first, last = self._words[argument.first], self._words[argument.last]
        if isinstance(value, bool):
            edits[first.start, last.end] = vllm_words.words(spec, value)[0]
            return
        text = vllm_words.plain(value)
        if spec.key is not None and not argument.key:
            text = json.dumps({**mapping(argument), spec.key: value})
        edits[first.start, last.end] = _respelled(self.text, first, argument, shlex.quote(text))


def _behind_program(words: list[str]) -> int:
    """Index of the first word behind the program."""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        if word.rpartition("/")[2] == "vllm" and following == "serve":
            return index + 2
        if word == "-m" and following in MODULES:
            return index + 2
    raise ConfigError(
        "this is no vLLM server command: it holds neither `vllm serve` nor `-m vllm.entrypoints.openai.api_server`"
    )


def _respelled(text: str, first: Word, argument: Argument, value: str) -> str:
    """The flag as the user spelled it, with another value."""
    spelled = text[first.start : first.end]
    if argument.first == argument.last and "=" in spelled:
        return f"{spelled.partition('=')[0]}={value}"
    return f"{spelled} {value}"


def _applied(text: str, edits: Mapping[tuple[int, int], str]) -> str:
    """All edits at once, from the end, so that places stay true; what is taken out needs no change inside."""
    whole = [
        span
        for span in edits
        if not any(
            other != span and other[0] <= span[0] and span[1] <= other[1] and span[0] < span[1]
            for other in edits
        )
    ]
    for start, end in sorted(whole, reverse=True):
        replacement = edits[start, end]
        text = text[:start] + replacement + text[end:]
    return text


def _judged_variables() -> set[str]:
    names = {spec.env or spec.secret_env for spec in vllm_names().values()}
    return {name for name in names if name} | {"CUDA_VISIBLE_DEVICES"}
