"""What in a command line or a file may not be shown? Keys, tokens and passwords, by the name they stand under."""

import re

HIDDEN = "(not shown)"
_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
_ELSEWHERE = {"env", "file", "path"}
_SHAPES = re.compile(r"\b(?:sk-|hf_|ghp_|github_pat_|xox[a-z]-)[A-Za-z0-9_-]{8,}")
VLLM_SECRETS = frozenset({"api-key", "hf-token", "watermark-config"})
"""Those that vLLM itself keeps out of its log; its other flags with `token` in their name count tokens."""


def names_a_secret(name: str) -> bool:
    """Whether what stands under this name is for nobody else's eyes."""
    words = re.split(r"[-_.]+", name.lower())
    # `api_key_env` names a variable and `ssl_key_file` a file: neither is the key.
    return words[-1] not in _ELSEWHERE and not _WORDS.isdisjoint(words)


def without_secrets(text: str) -> str:
    """`text` with whatever is shaped like a well-known kind of key taken out."""
    return _SHAPES.sub(HIDDEN, text)
