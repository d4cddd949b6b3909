"""What to ask: generated prompts with odd lengths, scripts and whitespace, or a file of real ones.

Generated prompts come from Hypothesis strategies, so that a prompt that shows a fault can be shrunk to the smallest
that still does. The same seed gives the same prompts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from zerodrift.core.errors import InvalidPrompt, RecordError
from zerodrift.core.request import Prompt

SENTENCES = (
    "The capital of France is",
    "A train leaves at nine and travels for three hours at eighty kilometres an hour. How far does it get?",
    "def mean(values):\n    return sum(values) /",
    "List three reasons why the sky looks blue, and explain each in one sentence.",
    "Once upon a time, in a village by the sea, there lived",
    "3 + 4 = 7\n5 + 6 = 11\n8 + 9 =",
    "Translate into German: the weights were updated, but the cache was not.",
    "|a|b|\n|-|-|\n|1|2|\n|3|",
    "What does it mean for two random variables to be independent?",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ответь одним словом: столица Италии —",
    "请用一句话解释什么是熵。",
    "مرحبا، كيف يمكنني",
    '{"name": "zerodrift", "version":',
    "🙂🙃🙂🙃🙂",
    "the the the the the the the the",
)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Around the page and chunk sizes that engines use."""


def texts() -> SearchStrategy[str]:
    """Sentences, whitespace, scripts, and repetitions of each."""
    words = st.sampled_from(SENTENCES)
    spaces = st.text(alphabet=" \t\n", min_size=1, max_size=12)
    anything = st.text(min_size=1, max_size=40)
    repeated = st.builds(lambda text, count: text * count, st.sampled_from(SENTENCES), st.integers(2, 4))
    return st.one_of(words, words, st.builds("".join, st.tuples(spaces, words)), anything, repeated)


def id_lists(vocab_size: int, longest: int, forbidden: Sequence[int]) -> SearchStrategy[list[int]]:
    """Random ids at lengths where pages and chunks begin and end."""
    allowed = st.integers(0, vocab_size - 1).filter(lambda token: token not in forbidden)
    lengths = [length for length in LENGTHS if length <= longest]
    return st.sampled_from(lengths).flatmap(lambda size: st.lists(allowed, min_size=size, max_size=size))


def generated(tokenizer: Any, vocab_size: int, longest: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts, half from text and half from ids, none longer than `longest` tokens."""
    special = tuple(tokenizer.all_special_ids)
    as_text = (
        texts().map(lambda text: tokenise(tokenizer, text)).filter(lambda p: len(p.token_ids) <= longest)
    )
    as_ids = id_lists(vocab_size, longest, special).map(lambda ids: Prompt(tuple(ids)))
    drawn: list[Prompt] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.one_of(as_text, as_ids))
    def collect(prompt: Prompt) -> None:
        drawn.append(prompt)

    collect()
    # Hypothesis begins with the simplest and repeats itself; prompts should be many and different.
    unique = list({prompt.token_ids: prompt for prompt in drawn}.values())
    step = max(1, len(unique) // count)
    return (unique[::step] * count)[:count]


def tokenise(tokenizer: Any, text: str) -> Prompt:
    """The prompt that the tokenizer makes of `text`, special tokens included."""
    ids = tuple(tokenizer(text)["input_ids"])
    if not ids:
        raise InvalidPrompt(f"the tokenizer makes no token of {text!r}")
    return Prompt(ids, text)


def from_file(path: Path, tokenizer: Any, longest: int, count: int) -> list[Prompt]:
    """The first `count` prompts of a JSON-lines file with `prompt` or `messages`, short enough for the context."""
    prompts: list[Prompt] = []
    if not path.is_file():
        raise RecordError(
            f"there is no prompt file {path}; give a JSON-lines file with `prompt` or `messages`"
        )
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == count:
                break
            if not line.strip():
                continue
            prompt = _prompt(line, tokenizer, f"{path.name}, line {number}")
            if len(prompt.token_ids) <= longest:
                prompts.append(prompt)
    if not prompts:
        raise RecordError(f"{path.name} holds no prompt of at most {longest} tokens")
    return prompts


def _prompt(line: str, tokenizer: Any, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where}: not JSON ({error.msg})") from error
    match entry:
        case {"prompt": str(text)}:
            return tokenise(tokenizer, text)
        case {"prompt": [*ids]} if ids and all(isinstance(token, int) for token in ids):
            return Prompt(tuple(ids))
        case {"messages": [*messages]}:
            rendered = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            return Prompt(tuple(rendered["input_ids"]))
        case _:
            raise RecordError(f"{where}: no `prompt` (text or ids) and no `messages`")
