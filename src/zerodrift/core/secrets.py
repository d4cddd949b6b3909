"""Which names are those of secrets? One rule for whatever is shown, written down or refused. In doubt it is one."""

import re

_NAMES = re.compile(
    r"secret|passw|passphrase|passcode|credential|token(?!s|i[sz]|_ids?$|_threshold)"
    r"|(?:api|auth|ssh|private|access|account|deploy|signing|encryption|master|license)_?keys?(?:_|$)"
    r"|(?:^|_)(?:hf|hub|access|auth|api|refresh|id|user|session|bot|git|gh|github|gitlab|wandb|slack)_tokens(?:_|$)"
    r"|(?:^|_)(?:pg|db|my|sql|mysql|redis|smtp|ftp|ssh|user|root|admin)?pass(?:_(?!config)|$)"
    r"|(?:^|_)(?:key|keys|auth|authorization|bearer|pwd|pw|cookies?|jwt|dsn|pat|webhook)(?:_|$)|watermark_config$"
)
# `api_key_env` names a variable and `token_file` a file: neither is the key.
_ELSEWHERE = re.compile(r"_(?:env|file|path)$")
_SHORTENED = ("--api-key", "--hf-token", "--watermark-config")
"""Flags of vLLM that argparse also takes by their first letters."""
_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Anywhere in the name of a variable: few are set on purpose, and none of those needs such a name."""


def names_a_secret(name: str, *, variable: bool = False) -> bool:
    """Whether what stands under this name is for nobody else's eyes; of a `variable` it takes less to say so."""
    if variable and any(word in name.upper() for word in _WORDS):
        return True
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()
    return _NAMES.search(words) is not None and _ELSEWHERE.search(words) is None


def flag_of_a_secret(flag: str) -> bool:
    """The same of a flag, which may be written with its first letters only."""
    shortened = flag[2:] and any(each.startswith(flag.replace("_", "-")) for each in _SHORTENED)
    return names_a_secret(flag) or bool(shortened)
