"""A vLLM command line: `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`, read and corrected."""

import re
from collections.abc import Mapping
from pathlib import Path

from zerodrift.doctor import launch_script, listed, secrets, vllm_flags, vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value, unknown
from zerodrift.doctor.tables import VLLM_VERSION, VllmName, vllm_names, vllm_options
from zerodrift.doctor.vllm_file import VllmFile
from zerodrift.doctor.vllm_flags import Argument, parse
from zerodrift.doctor.yaml_text import YamlText

_TRAILING = re.compile(r"(?<!\\)\s*\\$")  # a last line that was to go on: what is added would hang behind it
_CONTINUED = re.compile(r"\\\n([ \t]*)")


class CommandLine:
    """One command with the variables before it, or a launch script that holds it."""

    title = f"vLLM command line, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: str) -> None:
        self.text = _TRAILING.sub("", text.strip())
        self._launch = launch_script.find(self.text)
        self._words = self._launch.words
        self._parsed = parse([word.text for word in self._words], self._launch.behind)

    @property
    def model(self) -> str | None:
        """The positional, or --model."""
        if self._parsed.positionals:
            return self._words[self._parsed.positionals[0]].text
        flag = self._parsed.last("model")
        return flag.value if flag else None

    def read(self) -> Reading:
        """Flags win over the file that --config names, and that over defaults."""
        config, ignored = self._configs()
        file = self._file()
        hidden = [each for each in self._parsed.arguments if self._is_unknown(each) and not _is_there(each)]
        unseen = {each.name for each in hidden}
        known = [each for each in self._parsed.arguments if each not in hidden]
        taken = self._parsed._replace(arguments=tuple(each for each in known if self._refusal(each) is None))
        # vLLM puts what the file says before the other flags, so that these win.
        before = file.parsed.taken().arguments if file else ()
        seen = taken._replace(arguments=(*before, *taken.arguments))
        found = vllm_settings.settings(
            seen,
            {name: "?" if value is None else value for name, value in self._launch.env.items()},
            self.model or (file.model if file else None),
            unseen=unseen | self._unseen_variables(),
        )
        if any(self._words[index].unknown for index in (*self._parsed.positionals[1:], *self._parsed.strays)):
            found["unseen_words"] = unknown("unseen_words")
        found["refused"] = self._refused(file)
        if file is not None:
            found["dropped_lines"] = Setting(
                "dropped_lines", ", ".join(self._dropped(file)) or None, Origin.SET
            )
        if config or ignored:
            paths = ", ".join(secrets.safe(each.value) for each in ignored)
            found["ignored_config"] = Setting("ignored_config", paths or None, Origin.SET)
        judged = {spec.env or spec.secret_env for spec in vllm_names().values()} | listed.READ_TOO
        not_judged = [
            *vllm_settings.not_judged(taken, unseen),
            *(f"--{name}: its value comes from a variable that is not known here" for name in sorted(unseen)),
            *(file.read().not_judged if file else ()),
            *(name for name in self._launch.env if name not in judged),
            *(f"{name}, which is set and not exported" for name in self._launch.unexported),
            *(["variables that are set out of sight"] if self._launch.out_of_sight else []),
        ]
        return Reading(found, tuple(not_judged))

    def typed(self, name: str, value: Value) -> str | None:
        """As on the command line."""
        spec = vllm_names().get(name)
        file = self._file()
        if name == "dropped_lines":
            return " ".join(f"--no-{key.replace('_', '-')}" for key in self._dropped(file)) if file else None
        if name == "ignored_config":
            config, ignored = self._configs()
            path = secrets.safe(ignored[-1].value)
            return f"remove --config={path}" if config else f"--config {path}"
        if spec and spec.inner and self._is_in_json(spec):
            return f'"{spec.inner.key}": "{value}" in --{spec.inner.flag}'
        return vllm_flags.typed(name, value)

    def corrected(self, changes: Mapping[str, Value]) -> "CommandLine | None":
        """Values replaced where they stand, new flags behind the last word, new variables before the program."""
        if not self._launch.alone:
            return None
        edits: dict[int, str | None] = {}
        flags: list[str] = []
        variables: list[str] = []
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if spec is None or spec.key or self._is_in_json(spec):  # a JSON is left to its owner
                continue
            if spec.env is not None:
                self._set_variable(spec.env, value, edits, variables)
                continue
            there = [each for each in self._parsed.arguments if each.name in (spec.flag, *spec.also)]
            for argument in there:
                edits |= dict.fromkeys(range(argument.first, argument.last + 1))
            if value is None or (spec.kind == "presence" and not value):
                continue
            behind_equals = bool(there) and there[-1].first == there[-1].last and bool(there[-1].values)
            words = vllm_flags.flag_words(spec, value, "=" if behind_equals else " ")
            if there:
                edits[there[-1].first] = words
            else:
                flags.append(words)
        return CommandLine(self._written(edits, flags, variables))

    def printed(self) -> str:
        """The command without secrets; of a script nothing, for what its other lines hold is not known."""
        if not self._launch.alone:
            return secrets.HIDDEN
        edits: dict[int, str | None] = {}
        for index, (word, mask) in enumerate(zip(self._words, self._masks(), strict=True)):
            if mask is not None and not secrets.is_reference(self.text[word.start : word.end]):
                edits[index] = mask
        return secrets.hide_comments(self._written(edits, [], []), listed.names())

    @property
    def hides(self) -> bool:
        """Whether something in it is not printed."""
        return self.printed() != self.text

    def _masks(self) -> list[str | None]:
        """For each word what is printed in its place; None where it is itself."""
        words = [word.text for word in self._words]
        by_name = secrets.hidden(words, vllm_flags.flag_names())
        return [
            one or other
            for one, other in zip(by_name, listed.unlisted(words, self._launch.behind), strict=True)
        ]

    def _written(self, edits: Mapping[int, str | None], flags: list[str], variables: list[str]) -> str:
        """The text with other words; None takes one out."""
        text, done = "", 0
        program = self._launch.behind - 1
        first = next((i for i in range(program) if "=" not in self._words[i].text), program)
        if self._words[first].text.rpartition("/")[2] == "env":
            first += 1
        for index, word in enumerate(self._words):
            new = edits.get(index, self.text[word.start : word.end])
            if index == first:
                new = " ".join([*variables, new or ""])
            if new is not None:
                text += self.text[done : word.start] + new
            done = word.end
        indents = _CONTINUED.findall(self.text)
        gap = f" \\\n{indents[-1]}" if indents else " "
        return text + "".join(gap + flag for flag in flags) + self.text[done:]

    def _is_unknown(self, argument: Argument) -> bool:
        return any(word.unknown for word in self._words[argument.first : argument.last + 1])

    def _unseen_variables(self) -> set[str]:
        env = self._launch.env
        hidden = {name for name, value in env.items() if value is None}
        if self._launch.out_of_sight:
            hidden |= {spec.env for spec in vllm_names().values() if spec.env and spec.env not in env}
        return hidden

    def _refusal(self, argument: Argument) -> str | None:
        """Of a value that the shell fills in nothing can be said; PipelineRL's server has flags of its own."""
        if self._launch.is_vllm or argument.name in vllm_options().names:
            return vllm_flags.refusal(argument, value_known=not self._is_unknown(argument))
        return None

    def _refused(self, file: VllmFile | None) -> Setting:
        """What stops vLLM, on the command line and in the file; of words, it takes the model and no other."""
        masks = self._masks()
        extra = [
            "a word that is not shown" if masks[index] else f"the word {self._words[index].text!r}"
            for index in self._parsed.positionals[1:]
            if not self._words[index].unknown
        ]
        strays = [index for index in self._parsed.strays if not self._words[index].unknown]
        files = [each for each in self._parsed.arguments if each.name == "config" and each.last > each.first]
        known = {name: value for name, value in self._launch.env.items() if value is not None}
        return vllm_flags.refused(
            [
                *map(self._refusal, self._parsed.arguments),
                *vllm_flags.variable_refusals(known),
                *(f"{word} belongs to no flag" for word in extra),
                "a word behind a secret belongs to no flag" if strays else None,
                "--config stands there twice" if len(files) > 1 else None,
                str(file.read().settings["refused"].value or "") if file else None,
            ]
        )

    def _configs(self) -> tuple[Argument | None, list[Argument]]:
        """The --config that vLLM reads, and those that it ignores: it looks for a word that is `--config` alone."""
        given = [each for each in self._parsed.arguments if each.name == "config"]
        read = [each for each in given if each.last > each.first]
        return (read[-1] if read else None), [each for each in given if each.last == each.first]

    def _file(self) -> VllmFile | None:
        config, _ = self._configs()
        return VllmFile(YamlText.of(Path(config.value))) if config else None

    def _dropped(self, file: VllmFile) -> list[str]:
        """Lines of the file that vLLM drops and that no flag says again."""
        return [key for key in file.dropped if self._parsed.last(key.replace("_", "-")) is None]

    def _is_in_json(self, spec: VllmName) -> bool:
        file = self._file()
        return self._parsed.inside(spec) or (file is not None and file.parsed.inside(spec))

    def _set_variable(
        self, name: str, value: Value, edits: dict[int, str | None], variables: list[str]
    ) -> None:
        """Where it stands; a new one before the program, but for a container's, which is left to its owner."""
        place = self._launch.places.get(name)
        if place is not None:
            before = self._words[place].text.partition(name)[0]
            edits[place] = None if value is None else f"{before}{name}={vllm_flags.shell_value(value)}"
        elif value is not None and not self._launch.contained:
            variables.append(f"{name}={vllm_flags.shell_value(value)}")


def _is_there(argument: Argument) -> bool:
    """Of some flags it matters only that they are there."""
    kinds = {spec.kind for spec in vllm_names().values() if argument.name in (spec.flag, *spec.also)}
    return bool(kinds & {"presence", "secret"})
