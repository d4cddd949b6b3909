"""What to ask: generated prompts with odd lengths, scripts and whitespace, or a file of real ones.

Generated prompts come from Hypothesis strategies, so that a prompt that shows a fault can be shrunk to the smallest
that still does. The same seed gives the same prompts.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
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
PARTED = 272
"""Tokens of prompts that nearly agree: two of the largest cache blocks in use (128, vLLM on CPU), and one of 16 (on GPU)."""
PARTINGS = (24, 127, 128, 200)
"""Where one token differs: inside a block, its last, its first and again inside, for blocks of 16 as for those of 128. A
cache that looks at a part of a block takes one of these for the other."""
FORKS = (16, 72, 136)
"""Where all that follows differs: at the edge of a small block, and inside both sizes."""
FARTHEST = 1024
"""Tokens that a long prompt and its output come to unless more is asked for (validation.position_probes): as many as
fifteen others together, and attention is quadratic."""
LONGEST = 512
"""Of texts: attention is quadratic and faults are not."""
BYTES_PER_PROMPT = 2048
"""More than the longest of LENGTHS consumes; an example that runs out of bytes is none."""
ATTEMPTS = 20
"""Draws per prompt asked for, most of which are used: then a prompt comes twice."""


def texts() -> SearchStrategy[str]:
    """Sentences, whitespace, scripts, and repetitions of each."""
    words = st.sampled_from(SENTENCES)
    spaces = st.text(alphabet=" \t\n", min_size=1, max_size=12)
    # Drawn evenly, most code points would be unassigned ones.
    letters = st.characters(exclude_categories=("Cn", "Co", "Cs"))
    anything = st.text(alphabet=letters, min_size=1, max_size=40)
    repeated = st.builds(lambda text, count: text * count, st.sampled_from(SENTENCES), st.integers(2, 4))
    return st.one_of(words, words, st.builds("".join, st.tuples(spaces, words)), anything, repeated)


def id_lists(vocab_size: int, longest: int, forbidden: Sequence[int]) -> SearchStrategy[list[int]]:
    """Random ids at lengths where pages and chunks begin and end."""
    allowed = st.integers(0, vocab_size - 1).filter(lambda token: token not in forbidden)
    lengths = [length for length in LENGTHS if length <= longest]
    return st.sampled_from(lengths).flatmap(lambda size: st.lists(allowed, min_size=size, max_size=size))


def generated(tokenizer: Any, vocab_size: int, longest: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts from plain text, text after a BOS, chat, and ids, none longer than `longest` tokens."""
    if longest < 1 or count < 1:
        raise InvalidPrompt(
            f"asked for {count} prompts of at most {longest} tokens; both must be at least one"
        )
    special = tuple(tokenizer.all_special_ids)
    ways = st.sampled_from(_renderings(tokenizer))
    written = st.tuples(ways, texts()).map(lambda drawn: (drawn[0](tokenizer, drawn[1]), drawn[1]))
    as_text = written.filter(lambda pair: 0 < len(pair[0]) <= longest)
    as_ids = id_lists(vocab_size, longest, special).map(lambda ids: (tuple(ids), None))
    drawn: dict[tuple[int, ...], Prompt] = {}

    @hypothesis.settings(database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from([as_text, as_text, as_ids]).flatmap(lambda strategy: strategy))
    def collect(pair: tuple[tuple[int, ...], str | None]) -> None:
        drawn.setdefault(pair[0], Prompt(*pair))

    # Bytes of our own: Hypothesis by itself mixes in literals of whatever modules are loaded, and the same seed would
    # give other prompts in another program.
    source = random.Random(seed)
    draw: Any = collect
    for _ in range(ATTEMPTS * count):
        draw.hypothesis.fuzz_one_input(source.randbytes(BYTES_PER_PROMPT))
        if len(drawn) == count:
            break
    unique = list(drawn.values())
    return (unique * count)[:count]


def assorted(tokenizer: Any, vocab_size: int, room: int, answer: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts for a context that leaves `room` tokens beside `answer`: a quarter of them nearly agree with each
    other, one in sixteen is long, and the others are `generated`. Lengths are mixed, so that they are in every batch.
    """
    special = tuple(tokenizer.all_special_ids)
    farthest = min(room, FARTHEST - answer)
    lengths = [farthest >> halved for halved in range(count // 16) if farthest >> halved > PARTED]
    long = of_lengths(vocab_size, lengths, special, seed + 1)
    alike = nearly_alike(vocab_size, room, special, count // 4, seed)
    others = generated(tokenizer, vocab_size, min(room, LONGEST), count - len(long) - len(alike), seed)
    # Those that nearly agree stand early: where trials are fewer than twice the prompts, the first are asked again.
    # Long ones come behind the first eight, which the reference samples by itself, padded to the longest.
    return _dealt(others, [*alike[:4], *_dealt(long, alike[4:])])


FINISHED = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("How far is the lighthouse?", "The lighthouse is three miles away, along the coast."),
    ("Hello", "Hello! How can I help you today?"),
    ("What is 3 + 4?", "3 + 4 = 7."),
    ("Thank you, that is all.", "You're welcome! If you have any other questions, feel free to ask."),
    ("Is the moon a star?", "No, the moon is not a star. It is a natural satellite that orbits the Earth."),
)
"""Exchanges that have come to an end: behind a whole sentence a small chat model ends in 30 to 80 of 100 draws, behind one
word in one of 100."""


def before_ends(tokenizer: Any, stops: Sequence[int]) -> list[tuple[int, ...]]:
    """What stands before a stop token in finished exchanges, whole and the last turn alone; without a template, their text."""
    found = []
    for question, reply in FINISHED:
        ids = _as_exchange(tokenizer, question, reply)
        at = [place for place, token in enumerate(ids) if token in stops and place]
        found += [ids[: at[-1]], ids[[-1, *at][-2] + 1 : at[-1]]] if at else [ids]
    return [ids for ids in found if ids]


def _as_exchange(tokenizer: Any, question: str, reply: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    if tokenizer.chat_template is not None:
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
            return tuple(rendered["input_ids"])
        except Exception:  # a template is a program of the checkpoint, and refuses in any way it likes
            return _plain(tokenizer, f"{question}\n{reply}\n")
    return _plain(tokenizer, f"{question}\n{reply}\n")


def _dealt(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """One of each in turn, as long as there are two."""
    pairs = [prompt for pair in zip(first, second, strict=False) for prompt in pair]
    shared = min(len(first), len(second))
    return [*pairs, *first[shared:], *second[shared:]]


def nearly_alike(
    vocab_size: int, longest: int, special: Sequence[int], count: int, seed: int
) -> list[Prompt]:
    """A prompt of random ids, then such that differ from it by one token, or from some token on: as many as fit."""
    source = random.Random(seed)
    allowed = sorted(set(range(vocab_size)) - set(special))
    length = min(longest, PARTED)
    base = source.choices(allowed, k=length)
    alike = [Prompt(tuple(base))]
    for place in PARTINGS:
        other = source.choice([token for token in allowed if token != base[min(place, length - 1)]])
        alike.append(Prompt((*base[:place], other, *base[place + 1 :])))
    alike += [
        Prompt((*base[:place], *source.choices(allowed, k=length - place)))
        for place in FORKS
        if place < length
    ]
    # The last token of a prompt is always computed: a difference there shows nothing of a cache.
    fitting = [prompt for prompt in alike if len(prompt.token_ids) == length]
    return fitting[:count] if length > PARTINGS[0] + 1 and count > 1 else []


def of_lengths(vocab_size: int, lengths: Sequence[int], special: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of random ids, one of each length, to reach positions that text seldom does."""
    source = random.Random(seed)
    allowed = sorted(set(range(vocab_size)) - set(special))
    return [Prompt(tuple(source.choices(allowed, k=length))) for length in lengths]


def _renderings(tokenizer: Any) -> list[Callable[[Any, str], tuple[int, ...]]]:
    """Ways from text to ids that trainers use; a fault in one of them is invisible to prompts made in another."""
    ways: list[Callable[[Any, str], tuple[int, ...]]] = [_plain]
    if tokenizer.bos_token_id is not None:
        ways.append(_after_bos)
    if tokenizer.chat_template is not None:
        ways.append(_as_chat)
    return ways


def _plain(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text)["input_ids"])


def _after_bos(tokenizer: Any, text: str) -> tuple[int, ...]:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return (tokenizer.bos_token_id, *ids)


def _as_chat(tokenizer: Any, text: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return tuple(rendered["input_ids"])


def tokenise(tokenizer: Any, text: str) -> Prompt:
    """The prompt that the tokenizer makes of `text`, special tokens included."""
    ids = tuple(tokenizer(text)["input_ids"])
    if not ids:
        raise InvalidPrompt(f"the tokenizer makes no token of {text!r}")
    return Prompt(ids, text)


def check_file(path: Path) -> None:
    """There is a file to read prompts from; to be asked before a model is loaded."""
    if not path.is_file():
        raise RecordError(
            f"there is no prompt file {path}; give a JSON-lines file with `prompt`, `prompt_token_ids` or `messages`"
        )


def from_file(
    path: Path, tokenizer: Any, longest: int, count: int, vocab_size: int | None = None
) -> list[Prompt]:
    """The first `count` prompts of a JSON-lines file with `prompt`, `prompt_token_ids` or `messages`, short enough for the context.

    `vocab_size` None leaves it to the engine to refuse ids that the model does not have.
    """
    prompts: list[Prompt] = []
    check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(prompts) == count:
                break
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                prompt = _prompt(line, tokenizer, where)
                prompt.check_vocabulary(vocab_size or sys.maxsize)
            except InvalidPrompt as error:
                raise InvalidPrompt(f"{where}: {error}") from error
            if len(prompt.token_ids) > longest:
                raise InvalidPrompt(
                    f"{where}: a prompt of {len(prompt.token_ids)} tokens, and the context leaves room for {longest}; "
                    "shorten it, take fewer output tokens (validation.max_tokens), or give the engine a longer context"
                )
            prompts.append(prompt)
    if not prompts:
        raise RecordError(f"{path.name} holds no prompt")
    return prompts


_KEYS = ("prompt", "prompt_token_ids", "messages")
"""Where a line has its prompt."""


def _prompt(line: bytes, tokenizer: Any, where: str) -> Prompt:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(f"{where}: not UTF-8 ({error.reason})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"{where}: not JSON ({error})") from error
    match entry:
        case dict() if len(both := [key for key in _KEYS if key in entry]) > 1:
            raise RecordError(
                f"{where}: both `{both[0]}` and `{both[1]}`; keep the one that the trainer uses"
            )
        case {"prompt": str(text)}:
            return tokenise(tokenizer, _text(text, where))
        case {"prompt": [*ids]} | {"prompt_token_ids": [*ids]} if ids and all(
            isinstance(token, int) for token in ids
        ):
            return Prompt(tuple(ids))
        case {"messages": [*messages]}:
            return Prompt(_rendered(messages, tokenizer, where))
        case _:
            raise RecordError(f"{where}: no `prompt` (text or ids), no `prompt_token_ids` and no `messages`")


def _text(text: str, where: str) -> str:
    """JSON can spell half of a character (`\\ud800`), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"{where}: the prompt is no text ({error.reason})") from error
    return text


def _rendered(messages: list[Any], tokenizer: Any, where: str) -> tuple[int, ...]:
    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # a template is a program of the checkpoint, and fails in any way it likes
        what = str(error).partition("\n")[0]
        raise RecordError(
            f"{where}: the chat template does not take these messages ({what}); "
            "correct them, or give `prompt` with text or ids"
        ) from error
    return tuple(rendered["input_ids"])
