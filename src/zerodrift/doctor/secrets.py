"""What in a command or a file may not be shown? The value of whatever names a secret; in doubt, all of it.

Names of secrets cannot all be listed, so that of a command and of vLLM's own file only what the tables know is shown
(`listed`); this file knows secrets by their names and shapes wherever they stand.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

HIDDEN = "(not shown)"
_NAMES = re.compile(
    r"secret|passw|passphrase|passcode|credential|token(?!s|i[sz]|_ids?$|_threshold)"
    r"|(?:api|auth|ssh|private|access|account|deploy|signing|encryption|master|license)_?keys?(?:_|$)"
    r"|(?:^|_)(?:hf|hub|access|auth|api|refresh|id|user|session|bot|git|gh|github|gitlab|wandb|slack)_tokens(?:_|$)"
    r"|(?:^|_)(?:pg|db|my|sql|mysql|redis|smtp|ftp|ssh|user|root|admin)?pass(?:_(?!config)|$)"
    r"|(?:^|_)(?:key|keys|auth|authorization|bearer|pwd|pw|cookies?|jwt|dsn|pat|webhook)(?:_|$)|watermark_config$"
)
# `api_key_env` names a variable and `token_file` a file: neither is the key.
_ELSEWHERE = re.compile(r"_(?:env|file|path)$")
_SHORTENED = ("api-key", "hf-token", "watermark-config")
"""Flags of vLLM that argparse also takes by their first letters."""
# Long enough that `hf_overrides` and a branch called sk-fix are none of them.
_SHAPES = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[a-z]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w.-]+)|(?<=://)[^\s/@]+(?=@)"
)
ASSIGNED = re.compile(
    r"([A-Za-z_][\w.-]*)[\"'\\]*\s*[:=]|--?([A-Za-z][\w.-]*)\s+\S|\b(bearer)\s", re.IGNORECASE
)
WORD = re.compile(r"(-{0,2})([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\"?\$(?:\w+|\{\w+\})\"?")
PROGRAMS = frozenset(
    [
        "vllm",
        "serve",
        "env",
        "nohup",
        "exec",
        "time",
        "nice",
        "sudo",
        "uv",
        "poetry",
        "conda",
        "run",
        "python",
        "python3",
        "docker",
        "podman",
        "srun",
        "numactl",
        "taskset",
        "accelerate",
        "torchrun",
        "ray",
        "kubectl",
        "singularity",
        "apptainer",
        "stdbuf",
        "timeout",
        "setsid",
        "mpirun",
        "nsys",
    ]
)
"""May follow a variable, and are no piece of it."""


Unlisted = Callable[[tuple[str, ...], Any], Iterable[Any]]
"""From the path of a dict or list and what stands there to the keys or indices that no table knows."""


def _none(_path: tuple[str, ...], _tree: Any) -> Iterable[Any]:
    return ()


def names_a_secret(name: str) -> bool:
    """Whether what stands under this name is for nobody else's eyes."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()
    return _NAMES.search(words) is not None and _ELSEWHERE.search(words) is None


def holds_a_secret(text: str) -> bool:
    """Whether a value may hold one, whatever it is called: by its shape, or by a name in it."""
    if _SHAPES.search(text):
        return True
    if text.lstrip()[:1] in ("{", "["):
        try:  # keys may be escaped, and stand there twice
            return _in_json(json.loads(text, object_pairs_hook=tuple))
        except (ValueError, RecursionError):
            return True
    return any(names_a_secret(name) for found in ASSIGNED.findall(text) for name in found if name)


def safe(text: str) -> str:
    """A value as it may be printed."""
    return HIDDEN if holds_a_secret(text) else text


def without_secrets(text: str) -> str:
    """Prose of ours, with whatever is shaped like a well-known kind of key taken out."""
    return _SHAPES.sub(HIDDEN, text)


def hidden(words: Sequence[str], flags: Collection[str]) -> Iterator[str | None]:
    """For each word what to write in its place; None where it may stay. `flags` are known not to be values.

    A value goes on to the next flag, for quotes may be missing; that of a variable to the next word, the program.
    """
    named, by_flag, had_value = "", False, False
    before = option = ""
    for word in words:
        match = WORD.fullmatch(word)
        dashes, name, value = match.groups() if match else ("", "", None)
        if dashes:
            starts = not (named and by_flag) or name in flags or (had_value and dashes == "--")
        else:
            starts = value is not None and not (named and by_flag)
        option = name if dashes and starts else option
        if starts:
            secret = names_a_secret(name) or (bool(dashes) and _may_be_short_for_one(name))
            doubtful = value is not None and holds_a_secret(value)
            by_flag, had_value = bool(dashes), value is not None
            hide = had_value and (secret or doubtful)
            yield f'{dashes}{name}="${variable(name)}"' if hide else None
            named = name if (secret or doubtful) and (by_flag or before not in ("-e", "--env")) else ""
        elif word.rpartition("/")[2] in PROGRAMS:
            named = ""
            yield None
        elif named or holds_a_secret(word):
            yield f'"${variable(named or option or "value")}"'
            if not named:
                named, by_flag = option or "value", True
            named, had_value = named if by_flag else "", True
        else:
            yield None
        before = word


def is_reference(written: str) -> bool:
    """Whether a word, as written, is a variable of the shell and nothing else: it may be shown."""
    name, _, value = written.rpartition("=")
    return _REFERENCE.fullmatch(value) is not None and '"' not in name and "$" not in name


def hide_below(tree: Any, flags: Collection[str], unlisted: Unlisted = _none) -> bool:
    """Take every secret out of a YAML tree, in place; returns whether there was one. `unlisted` finds more of them."""
    found = set(_named(tree, below=False))
    return _replace(tree, flags, found, unlisted, ())


def hide_comments(text: str, known: Collection[str] | None = None) -> str:
    """A text without the comments that hold one; with `known`, without those that set another name than these."""

    def shown(match: re.Match[str]) -> str:
        named = [name for found in ASSIGNED.findall(match[0]) for name in found if name]
        unlisted = known is not None and not all(name.replace("-", "_") in known for name in named)
        return f"# {HIDDEN}" if unlisted or holds_a_secret(match[0]) else match[0]

    return re.sub(r"(?m)(^|(?<=\s))#.*$", shown, text)


def _may_be_short_for_one(name: str) -> bool:
    return any(flag.startswith(name.replace("_", "-")) for flag in _SHORTENED)


def variable(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()


def says_nothing(value: object) -> bool:
    return value is None or value == "" or isinstance(value, bool)


def _in_json(value: Any) -> bool:
    """Objects are tuples of pairs here."""
    if isinstance(value, tuple):
        return any(
            (names_a_secret(key) and not says_nothing(inner)) or _in_json(inner) for key, inner in value
        )
    if isinstance(value, list):
        return any(map(_in_json, value))
    return isinstance(value, str) and holds_a_secret(value)


def _named(tree: Any, *, below: bool) -> Iterator[object]:
    """Every value under a name: an anchor may carry it to where no name tells."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named(value, below=below or names_a_secret(str(key)))
    elif isinstance(tree, list):
        for value in tree:
            yield from _named(value, below=below)
    elif below and not says_nothing(tree):
        yield tree


def _replace(
    tree: Any,
    flags: Collection[str],
    secrets: Collection[object],
    unlisted: Unlisted,
    path: tuple[str, ...],
) -> bool:
    changed = False
    if isinstance(tree, dict):
        places = [(key, names_a_secret(str(key))) for key in tree]
    else:
        strings = [each if isinstance(each, str) else "" for each in tree]
        places = [(index, new is not None) for index, new in enumerate(hidden(strings, flags))]
    more = set(unlisted(path, tree))
    for place, secret in places:
        value = tree[place]
        if (secret or place in more) and not says_nothing(value):
            tree[place] = HIDDEN
            changed = True
        elif isinstance(value, dict | list):
            changed |= _replace(value, flags, secrets, unlisted, (*path, str(place)))
        elif (isinstance(value, str) and holds_a_secret(value)) or (
            not says_nothing(value) and value in secrets
        ):
            tree[place] = HIDDEN
            changed = True
    return changed
