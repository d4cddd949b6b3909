"""What in a command line or a file may not be shown? Keys, tokens and passwords, by the name they stand under."""

import re

HIDDEN = "(not shown)"
_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
_ELSEWHERE = {"env", "file", "path"}
# Long enough that `hf_overrides` and a branch called sk-fix are none of them.
_SHAPES = re.compile(r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,})")
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
