"""A vLLM command line: `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`, read and corrected."""

import re
from collections.abc import Mapping
from pathlib import Path

from zerodrift.doctor import checkpoint, secrets, shell_words, vllm_flags, vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value, unknown
from zerodrift.doctor.tables import VLLM_VERSION, vllm_names
from zerodrift.doctor.vllm_file import VllmFile
from zerodrift.doctor.yaml_text import YamlText, read_text

_REFERENCE = re.compile(r"(?:[\w.-]+=)?(\"?)\$(?:\w+|\{\w+\})\1")
"""A variable of the shell and nothing else, which may be shown."""
_CONTINUED = re.compile(r"\\\n([ \t]*)")


class CommandLine:
    """One command with the variables before it."""

    title = f"vLLM command line, defaults of vLLM {VLLM_VERSION}"

    def __init__(self, text: str) -> None:
        self.text = text.strip().removesuffix("\\").rstrip()  # a last line that was to go on
        self._launch = shell_words.find(self.text)
        self._words = self._launch.words
        texts, behind = [word.text for word in self._words], self._launch.behind
        self._parsed = vllm_flags.parse(texts, behind)
        self._masks = [*secrets.hidden(texts[: behind - 2]), None, None, *secrets.hidden(texts[behind:])]
        given = [each for each in self._parsed.arguments if each.name == "config"]
        # vLLM looks for a word that is `--config` alone, and ignores any other form.
        self._configs = [each for each in given if each.last > each.first]
        self._ignored = [each for each in given if each.last == each.first]
        self._file = _file(self._configs[-1].value) if self._configs else None

    @property
    def model(self) -> str | None:
        """The positional, or --model, or what the file says."""
        if self._parsed.positionals:
            return self._words[self._parsed.positionals[0]].text
        flag = self._parsed.last("model")
        return flag.value if flag else self._file.model if self._file else None

    def read(self) -> Reading:
        """Flags win over the file that --config names, and that over defaults."""
        file, taken, env = self._file, self._parsed.taken(), self._launch.env
        # vLLM puts what the file says before the other flags, so that these win.
        before = file.parsed.taken().arguments if file else ()
        found = vllm_settings.settings(taken._replace(arguments=(*before, *taken.arguments)), env, self.model)
        if any("$" in self._words[index].text for index in self._parsed.positionals[1:]):
            found["unseen_words"] = unknown("unseen_words")
        found["refused"] = self._refused()
        if file is not None:
            found["dropped_lines"] = Setting("dropped_lines", ", ".join(self._dropped()) or None, Origin.SET)
        if self._configs or self._ignored:
            paths = ", ".join(secrets.safe(each.value) for each in self._ignored)
            found["ignored_config"] = Setting("ignored_config", paths or None, Origin.SET)
        judged = {spec.env or spec.secret_env for spec in vllm_names().values()} | vllm_settings.READ_TOO
        of_file = file.read().not_judged if file else ()
        others = (name for name in env if name not in judged)
        missing = checkpoint.missing(self.model) if not file or file.model != self.model else ()
        return Reading(found, (*missing, *vllm_settings.not_judged(taken), *of_file, *others))

    def typed(self, name: str, value: Value) -> str | None:
        """As on the command line."""
        if name == "dropped_lines":
            return " ".join(f"--no-{key.replace('_', '-')}" for key in self._dropped()) or None
        if name == "ignored_config":
            path = secrets.safe(self._ignored[-1].value)
            return f"remove --config={path}" if self._configs else f"--config {path}"
        if self._is_in_json(name):
            flag, key = vllm_names()[name].inner or ("", "")
            return f'"{key}": "{value}" in --{flag}'
        return vllm_flags.typed(name, value)

    def corrected(self, changes: Mapping[str, Value]) -> "CommandLine":
        """What is changed is taken out and written anew: flags behind the last word, variables before the first."""
        gone: set[int] = set()
        flags: list[str] = []
        variables: list[str] = []
        for name, value in changes.items():
            spec = vllm_names().get(name)
            if spec is None or spec.key or self._is_in_json(name):  # a JSON is left to its owner
                continue
            gone |= {place for variable, place in self._launch.places.items() if variable == spec.env}
            for argument in self._parsed.arguments:
                if argument.name in (spec.flag, *spec.also):
                    gone.update(range(argument.first, argument.last + 1))
            if (written := vllm_flags.written(spec, value)) is not None:
                (flags if spec.env is None else variables).append(written)
        return CommandLine(self._written(dict.fromkeys(gone), flags, variables))

    def printed(self) -> str:
        """The command without secrets."""
        masks = {
            index: mask
            for index, (word, mask) in enumerate(zip(self._words, self._masks, strict=True))
            if mask is not None and not _REFERENCE.fullmatch(self.text[word.start : word.end])
        }
        return secrets.hide_comments(self._written(masks, [], []))

    def _written(self, edits: Mapping[int, str | None], flags: list[str], variables: list[str]) -> str:
        """The text with other words, None taking one out, and more of them at either end."""
        done = self._words[0].start
        text = self.text[:done] + " ".join(variables)
        for index, word in enumerate(self._words):
            new = edits.get(index, self.text[word.start : word.end])
            if new is not None:
                text += (self.text[done : word.start] if index else " " * bool(variables)) + new
            done = word.end
        indents = _CONTINUED.findall(self.text)
        gap = f" \\\n{indents[-1]}" if indents else " "
        return text + "".join(gap + flag for flag in flags) + self.text[done:]

    def _refused(self) -> Setting:
        """What stops vLLM, on the command line and in the file; of words, it takes the model and no other."""
        extra = [
            secrets.HIDDEN if self._masks[index] else repr(self._words[index].text)
            for index in self._parsed.positionals[1:]
            if "$" not in self._words[index].text
        ]
        return vllm_flags.refused(
            self._parsed,
            self._launch.env,
            [
                *(f"the word {word} belongs to no flag" for word in extra),
                "--config stands there twice" if len(self._configs) > 1 else None,
                str(self._file.read().settings["refused"].value or "") if self._file else None,
            ],
        )

    def _dropped(self) -> list[str]:
        """Lines of the file that vLLM drops and that no flag says again."""
        dropped = self._file.dropped if self._file else ()
        return [key for key in dropped if self._parsed.last(key.replace("_", "-")) is None]

    def _is_in_json(self, name: str) -> bool:
        spec = vllm_names().get(name)
        parsed = [self._parsed, *([self._file.parsed] if self._file else [])]
        return spec is not None and any(each.inside(spec) is not None for each in parsed)


def _file(path: str) -> VllmFile:
    return VllmFile(YamlText(read_text(Path(path)), path))
