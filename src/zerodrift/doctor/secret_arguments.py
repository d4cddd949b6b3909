"""Which words of a command line are secret? Values of flags that hold one, and what strayed behind them.

`--api-key=my key` is two words to a shell, and the second belongs to no flag. It is a piece of the key all the same,
so it is neither read nor shown.
"""

import re
from collections.abc import Mapping, Sequence

from zerodrift.doctor import json_secrets
from zerodrift.doctor.secrets import VLLM_SECRETS, names_a_secret
from zerodrift.doctor.shell_words import Word
from zerodrift.doctor.tables import vllm_options
from zerodrift.doctor.vllm_arguments import Argument, Parsed, mapping

_VARIABLES = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
# `${NAME:-value}`: the name may be shown, and nothing behind it.
_WITH_MORE = re.compile(r"\$\{(\w+)[^\w}][^}]*\}")


def is_secret(argument: Argument) -> bool:
    """Whether its values, or something in them, are for nobody else's eyes."""
    return _by_name(argument) or any(map(json_secrets.inside, argument.values))


def _by_name(argument: Argument) -> bool:
    if argument.key and json_secrets.held(mapping(argument)):
        return True
    known = vllm_options().names
    names = (argument.name, *argument.candidates)  # `--api` may have been meant for --api-key
    return any(name in VLLM_SECRETS or (name not in known and names_a_secret(name)) for name in names)


def is_reference(value: str, word: Word) -> bool:
    """Whether the value is a variable of the shell and nothing else: it may be shown."""
    return value in word.expands and not _WITH_MORE.fullmatch(value)


def may_be_shown(argument: Argument, value: str, word: Word) -> bool:
    """Whether a value of a flag that holds a secret comes from variables, or all that is secret in it does."""
    secrets = [] if _by_name(argument) else json_secrets.inside(value)
    return all(is_reference(each, word) for each in secrets or [value])


def expansion(text: str) -> str:
    """What the shell puts in, by its name."""
    return _WITH_MORE.sub(r"${\1}", text)


def variable(argument: Argument, index: int) -> str:
    """The variable that should hold the word at `index`: vLLM takes several keys, and each opens the server."""
    name = _VARIABLES.get(argument.name) or re.sub(r"\W", "_", spelled(argument)).upper()
    # Behind a `=` the first value shares its word with the flag.
    number = index - argument.first + (argument.first == argument.last and bool(argument.values))
    return f'"${name}"' if number == 1 else f'"${name}_{number}"'


def spelled(argument: Argument) -> str:
    """The flag without its dashes, with the key behind its dot."""
    return f"{argument.name}.{argument.key}" if argument.key else argument.name


def apart(parsed: Parsed, words: Sequence[str]) -> tuple[Parsed, Mapping[int, Argument]]:
    """What is no secret's, and each word that strayed behind a secret with the flag that it stands behind."""
    starts = {argument.first: argument for argument in parsed.arguments}
    named = parsed.last("model") is not None or len(parsed.positionals) > 1
    strays: dict[int, Argument] = {}
    for secret in filter(is_secret, parsed.arguments):
        index = secret.last + 1
        while index < len(words):
            following = starts.get(index)
            if following is not None and not _strayed(following, secret, words):
                break
            if following is None and not named:  # the only word that can be the model
                break
            last = index if following is None else following.last
            strays |= dict.fromkeys(range(index, last + 1), secret)
            index = last + 1
    rest = Parsed(
        tuple(each for each in parsed.arguments if each.first not in strays),
        tuple(index for index in parsed.positionals if index not in strays),
    )
    return rest, strays


def _strayed(flag: Argument, secret: Argument, words: Sequence[str]) -> bool:
    """Whether what looks like a flag is a key that begins with a dash; two dashes behind a value are a slip of the pen."""
    if flag.name in vllm_options().names or flag.candidates:
        return False
    return not secret.values or not words[flag.first].startswith("--")
