"""A checkpoint without a tokenizer: trainers save weights alone, and recorded rollouts are ids already.

What is lost is text in the report, and the question whether another template made the prompts.
"""

from pathlib import Path
from typing import Any

from zerodrift import models
from zerodrift.models.spec import builtin_name, directory_of

TOKENIZER = "tokenizer.json"


class IdsAlone:
    """Stands where a tokenizer would: ids are shown as numbers, and their text is read as those."""

    lost = "tokens are shown as ids, and other templates are not tried"
    chat_template = None
    pad_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        """Numbers with a space before each."""
        return "".join(f" {token}" for token in ids)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        """Ids of what `decode` wrote; none of other text, which only a tokenizer could read."""
        words = text.split()
        return {"input_ids": [int(word) for word in words] if all(map(str.isdecimal, words)) else []}


def tokenizer_or_ids(spec: str | Path) -> Any:
    """The model's tokenizer; one of ids where it has none. One that cannot be read is refused as everywhere."""
    if builtin_name(spec) is None and not (directory_of(spec) / TOKENIZER).exists():
        return IdsAlone()
    return models.tokenizer(spec)
