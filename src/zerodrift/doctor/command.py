"""A vLLM command line: `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`, read and changed in place."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from zerodrift.doctor import (
    checkpoint,
    generation_defaults,
    json_secrets,
    launcher_secrets,
    program,
    secret_arguments,
    vllm_refusals,
    vllm_settings,
    vllm_words,
)
from zerodrift.doctor.secrets import names_a_secret
from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.shell_words import Word, commands
from zerodrift.doctor.tables import VLLM_VERSION, VllmName, vllm_names, vllm_options
from zerodrift.doctor.target import Reading
from zerodrift.doctor.vllm_arguments import Argument, Parsed, in_force, mapping, parse
from zerodrift.doctor.vllm_file import VllmFile

_TRAILING = re.compile(r"(?<!\\)\s*\\$")  # a last line that was to go on: what is added would hang behind it
_CONTINUED = re.compile(r"\\\n([ \t]*)")


class CommandLine:
    """One command, with the variables that stand before it."""

    title = f"vLLM command line, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: str) -> None:
        self.text = _TRAILING.sub("", text.strip())
        self._program = program.find(commands(self.text))
        self._words = self._program.words
        self._texts = [word.text for word in self._words]
        parsed = parse(self._texts, self._program.behind)
        self._parsed, self._strays = secret_arguments.apart(parsed, self._texts)

    @property
    def model(self) -> str | None:
        """The positional, or --model."""
        if self._parsed.positionals:
            return self._texts[self._parsed.positionals[0]]
        flag = self._parsed.last("model")
        return flag.value if flag else None

    def read(self) -> Reading:
        """Flags win over the file that --config names, and that over defaults."""
        config, ignored = self._configs()
        file = self._file()
        env = {name: variable.value for name, variable in self._program.env.items()}
        taken = self._parsed._replace(
            arguments=tuple(each for each in self._parsed.arguments if self._refusal(each) is None)
        )
        hidden = {each.name: each for each in taken.arguments if self._is_hidden(each)}
        # vLLM puts what the file says before the other flags, so that these win.
        before = vllm_refusals.without_refused(file.parsed).arguments if file else ()
        here = (each for each in taken.arguments if not self._is_hidden(each))
        seen = taken._replace(arguments=(*before, *here))
        found = vllm_settings.settings(seen, env, self.model or (file.model if file else None))
        if hidden.keys() & checkpoint.FLAGS and found["quantization"].origin is Origin.CHECKPOINT:
            vllm_settings.from_checkpoint(found, unknown("quantization"))
        if "quantization" in hidden:  # whatever the checkpoint says
            found.pop(checkpoint.NAME, None)
        for name, spec in vllm_names().items():
            variable = self._program.env.get(spec.env or "")
            if (spec.flag in hidden and spec.kind != "secret") or (variable and not variable.seen):
                found[name] = unknown(name)
            # vLLM does not take both: where the flag of its own is to be seen, it counts.
            if spec.inner and spec.inner.flag in hidden and seen.last(spec.flag or "") is None:
                found[name] = unknown(name)
        if hidden.keys() & generation_defaults.FLAGS:
            found[generation_defaults.NAME] = unknown(generation_defaults.NAME)
        if any(self._words[index].expands for index in (*self._parsed.positionals[1:], *self._strays)):
            found["unseen_words"] = unknown("unseen_words")
        found["refused"] = self._refused(file)
        if file is not None:
            dropped = [key for key in file.dropped if self._parsed.last(key.replace("_", "-")) is None]
            found["dropped_lines"] = Setting("dropped_lines", ", ".join(dropped) or None, Origin.SET)
        if config or ignored:
            paths = ", ".join(each.value for each in ignored)
            found["ignored_config"] = Setting("ignored_config", paths or None, Origin.SET)
        listed = [
            *vllm_settings.not_judged(taken, hidden.keys()),
            *self._unexpanded(hidden.values()),
            *(file.read().not_judged if file else ()),
            *(name for name in self._program.env if name not in _judged_variables()),
            *self._program.unread,
        ]
        return Reading(found, tuple(listed))

    def _expansions(self, first: int, last: int) -> list[str]:
        return [each for word in self._words[first : last + 1] for each in word.expands]

    def _is_hidden(self, argument: Argument) -> bool:
        """Whether its value is the shell's to know; of some flags it matters only that they are there."""
        kinds = {spec.kind for spec in vllm_names().values() if argument.name in (spec.flag, *spec.also)}
        return not kinds & {"presence", "secret"} and bool(self._expansions(argument.first, argument.last))

    def _legible(self) -> Parsed:
        """Without a JSON that is the shell's to know."""
        seen = (each for each in self._parsed.arguments if each.key or not self._is_hidden(each))
        return self._parsed._replace(arguments=tuple(seen))

    def _unexpanded(self, hidden: Iterable[Argument]) -> list[str]:
        """What the shell puts in, and where."""
        flags = [(f"--{each.name} ", self._expansions(each.first, each.last)) for each in hidden]
        words = [("", self._expansions(index, index)) for index in self._parsed.positionals[1:]]
        return [
            f"{flag}{' '.join(map(secret_arguments.expansion, found))}: a variable of the shell, which is not expanded here"
            for flag, found in (*flags, *words)
            if found
        ]

    def _refusal(self, argument: Argument) -> str | None:
        """Of a value that the shell fills in nothing can be said; PipelineRL's server has flags of its own."""
        if self._program.is_vllm or argument.name in vllm_options().names:
            unseen = bool(self._expansions(argument.first, argument.last))
            return vllm_refusals.of_flag(argument) if unseen else vllm_refusals.refusal(argument)
        return None

    def _stray_words(self) -> list[Argument]:
        """The secrets that words strayed behind; what the shell puts in may be no word at all."""
        return [secret for index, secret in self._strays.items() if not self._words[index].expands]

    def _refused(self, file: VllmFile | None) -> Setting:
        """What stops vLLM, on the command line and in the file; of words, it takes the model and no other."""
        extra = [
            f"the word {self._texts[index]!r} belongs to no flag"
            for index in self._parsed.positionals[1:]
            if not self._words[index].expands
        ]
        env = self._program.env
        files = [each for each in self._parsed.arguments if each.name == "config" and each.last > each.first]
        return vllm_refusals.setting(
            [
                *map(self._refusal, self._parsed.arguments),
                *vllm_refusals.of_variables({each.name: each.value for each in env.values() if each.seen}),
                *extra,
                *(f"a word behind --{secret.name} belongs to no flag" for secret in self._stray_words()),
                "--config stands there twice" if len(files) > 1 else None,
                str(file.read().settings["refused"].value or "") if file else None,
            ]
        )

    def typed(self, name: str, value: Value) -> str | None:
        """As on the command line."""
        if name == "dropped_lines":
            return " ".join(f"--no-{key.replace('_', '-')}" for key in self._dropped({}))
        if name == "ignored_config":
            config, ignored = self._configs()
            return f"remove --config={ignored[-1].value}" if config else f"--config {ignored[-1].value}"
        spec = vllm_names().get(name)
        if value is not None and spec is not None and (words := self._inside(spec, value)):
            return " ".join(words)
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
            elif name == "ignored_config":
                self._set_config(edits)
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
            where = self._program.new_at
            edits[where, where] = "".join(self._program.new_as.format(variable) for variable in variables)
        return _applied(self.text, edits)

    def _configs(self) -> tuple[Argument | None, list[Argument]]:
        """The --config that vLLM reads, and those that it ignores: it looks for a word that is `--config` alone."""
        given = [each for each in self._parsed.arguments if each.name == "config"]
        read = [each for each in given if each.last > each.first]
        return (read[-1] if read else None), [each for each in given if each.last == each.first]

    def _set_config(self, edits: dict[tuple[int, int], str]) -> None:
        """Two words of the last that is ignored, where none is read; vLLM does not take two files."""
        config, ignored = self._configs()
        for argument in ignored:
            word = self._words[argument.first]
            if config is None and argument is ignored[-1]:
                edits[word.start, word.end] = self.text[word.start : word.end].replace("=", " ", 1)
            else:
                edits[self._words[argument.first - 1].end, word.end] = ""

    def _dropped(self, changes: Mapping[str, Value]) -> list[str]:
        """Lines of the file that vLLM drops and that no other change writes."""
        value = self.read().settings["dropped_lines"].value
        flags = {spec.flag for name in changes if (spec := vllm_names().get(name)) is not None}
        return [key for key in str(value).split(", ") if key.replace("_", "-") not in flags]

    def _gap(self) -> str:
        """What stands between two flags here: a blank, or a new line where the command is written so."""
        indents = _CONTINUED.findall(self.text)
        return f" \\\n{indents[-1]}" if indents else " "

    def _hidden(self) -> dict[tuple[int, int], str]:
        """Secrets by the variable that should hold them; one that comes from a variable already may stay."""
        edits: dict[tuple[int, int], str] = {}
        for variable in self._program.written:
            if names_a_secret(variable.name) and not secret_arguments.is_reference(
                variable.value, variable.word
            ):
                edits[variable.word.start, variable.word.end] = (
                    f'{variable.before}{variable.name}="${variable.name}"'
                )
        before = self._words[: self._program.starts]
        edits = launcher_secrets.behind_options(before) | edits
        for word in (*before, *(variable.word for variable in self._program.written)):
            raw = self.text[word.start : word.end]
            shown = launcher_secrets.in_json(word) or launcher_secrets.behind_names(raw)
            if (word.start, word.end) not in edits and shown != raw:
                edits[word.start, word.end] = shown
        for argument in filter(secret_arguments.is_secret, self._parsed.arguments):
            self._hide_values(argument, edits)
        for index, secret in self._strays.items():
            self._hide_word(index, secret, edits)
        return edits

    def _hide_values(self, argument: Argument, edits: dict[tuple[int, int], str]) -> None:
        if argument.values and argument.first == argument.last:
            word = self._words[argument.first]
            if not secret_arguments.may_be_shown(argument, argument.value, word):
                # Without the `=` the flag would take the next word as well.
                hidden = secret_arguments.variable(argument, argument.first)
                edits[word.start, word.end] = f"--{secret_arguments.spelled(argument)}={hidden}"
            return
        for index in range(argument.first + 1, argument.last + 1):
            self._hide_word(index, argument, edits)

    def _hide_word(self, index: int, secret: Argument, edits: dict[tuple[int, int], str]) -> None:
        word = self._words[index]
        if not secret_arguments.may_be_shown(secret, word.text, word):
            edits[word.start, word.end] = secret_arguments.variable(secret, index)

    def _set_variable(
        self, name: str, value: str, edits: dict[tuple[int, int], str], variables: list[str]
    ) -> None:
        if (there := self._program.env.get(name)) is not None:
            edits[there.word.start, there.word.end] = f"{there.before}{name}={value}"
        else:
            variables.append(f"{name}={value}")

    def _set_flag(self, spec: VllmName, value: Value, edits: dict[tuple[int, int], str]) -> list[list[str]]:
        """Change the flag where it stands; what has to be appended is returned."""
        if inner := vllm_settings.inside(spec, self._legible()):
            return self._set_flag(inner, value, edits)
        if value is not None and (words := self._inside(spec, value)):
            return [words]
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

    def _inside(self, spec: VllmName, value: Value) -> list[str]:
        """The words of a setting that a JSON holds, here or in the file, with all else that it holds."""
        file = self._file()
        before = file.parsed.arguments if file else ()
        both = self._parsed._replace(arguments=(*before, *self._legible().arguments))
        inner = vllm_settings.inside(spec, both)
        if inner is None:
            return []
        given = [each for each in both.arguments if each.name == inner.flag]
        if any(each.key for each in given):
            return [f"--{inner.flag}.{inner.key}", shlex.quote(vllm_words.plain(value))]
        both_said = json_secrets.without({**in_force(given), str(inner.key): value})
        return [f"--{inner.flag}", shlex.quote(json.dumps(both_said))]

    def _file(self) -> VllmFile | None:
        config, _ = self._configs()
        return VllmFile.of(Path(config.value)) if config else None

    def _replace(
        self, argument: Argument, spec: VllmName, value: Value, edits: dict[tuple[int, int], str]
    ) -> None:
        first, last = self._words[argument.first], self._words[argument.last]
        if isinstance(value, bool):
            edits[first.start, last.end] = vllm_words.words(spec, value)[0]
            return
        text = vllm_words.plain(value)
        if spec.key is not None and not argument.key:
            text = json.dumps(json_secrets.without({**mapping(argument), spec.key: value}))
        edits[first.start, last.end] = _respelled(self.text, first, argument, shlex.quote(text))


def _respelled(text: str, first: Word, argument: Argument, value: str) -> str:
    """The flag as the user spelled it, with another value."""
    spelled = text[first.start : first.end]
    if argument.first == argument.last and "=" in spelled:
        return f"{spelled.partition('=')[0]}={value}"
    if argument.first == argument.last:  # `-qfp8`
        return f"--{argument.name} {value}"
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
    read_too = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}
    return {name for name in names if name} | read_too
