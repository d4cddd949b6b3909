"""Bugs in which ids the engine continues: it answers as if they were those that the trainer scores."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from history.bug import reenacted
from history.twin import Twin
from zerodrift.core.completion import Answer
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import LineageSegment

Ids = tuple[int, ...]
QUESTIONS = (
    "How far is the lighthouse?",
    "What is 12+7?",
    "When does the tide go out?",
    "Who wrote the book?",
    "Is the path good?",
    "What did she count?",
)
THOUGHTS = ("<think>She counted ten, so it is ten.</think>", "<think>The tide decides.</think>")


class OtherIds(Twin):
    """Continues `seen(ids)` where `ids` were sent, and says that it continued `ids`."""

    def __init__(self, engine: Any, seen: Callable[[Any, Ids], Ids]) -> None:
        super().__init__(engine)
        self._seen = seen

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        tokenizer = self.reference.tokenizer
        sent = [
            msgspec.structs.replace(
                each,
                prompt=msgspec.structs.replace(
                    each.prompt, token_ids=self._seen(tokenizer, each.prompt.token_ids)
                ),
            )
            for each in requests
        ]
        return [
            msgspec.structs.replace(
                answer,
                completions=tuple(_claiming(each, request.prompt.token_ids) for each in answer.completions),
            )
            for request, answer in zip(requests, super().generate(sent), strict=True)
        ]


def _claiming(completion: Any, ids: Ids) -> Any:
    written = LineageSegment(
        completion.versions[0].version, 0, len(ids) + max(len(completion.token_ids) - 1, 0)
    )
    return msgspec.structs.replace(completion, prompt_token_ids=ids, prompt_logprobs=(), lineage=(written,))


def _rendered(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> Ids:
    turns = [{"role": role, "content": content} for role, content in messages]
    return tuple(
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    )


def conversations(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """A question, an answer, what a tool said, and the next turn to be written."""
    source = random.Random(seed)
    found: dict[Ids, Prompt] = {}
    while len(found) < count:
        ids = _rendered(
            tokenizer,
            [
                ("user", source.choice(QUESTIONS)),
                ("assistant", f"{source.choice(THOUGHTS)} I look it up: {source.randrange(1000)}."),
                ("tool", f"{source.randrange(100)} miles"),
            ],
        )
        found.setdefault(ids, Prompt(ids))
    return list(found.values())


def after_bos(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """Chats whose template writes the beginning of sequence itself, as Llama's does."""
    chats = conversations(tokenizer, count, seed)
    return [Prompt((tokenizer.bos_token_id, *chat.token_ids)) for chat in chats]


def sampled_histories(tokenizer: Any, count: int, seed: int) -> list[Prompt]:
    """Conversations whose assistant turn was sampled: any ids, seldom those that the tokenizer would have chosen."""
    source = random.Random(seed)
    head = _rendered(tokenizer, [("user", QUESTIONS[0])])
    tail = tuple(tokenizer("<|im_end|>\n<|im_start|>user\nAnd then?", add_special_tokens=False)["input_ids"])
    plain = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    return [Prompt((*head, *source.choices(plain, k=24), *tail)) for _ in range(count)]


def _without_separators(tokenizer: Any, ids: Ids) -> Ids:
    """The newline after an assistant's end of turn is the template's, and no assistant samples it."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tuple(tokenizer("assistant\n", add_special_tokens=False)["input_ids"])
    newline = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
    kept: list[int] = []
    speaking = False
    place = 0
    while place < len(ids):
        token = ids[place]
        if token == start:
            speaking = ids[place + 1 : place + 1 + len(assistant)] == assistant
        kept.append(token)
        place += 1
        if token == end and speaking and ids[place : place + len(newline)] == newline:
            place += len(newline)
    return tuple(kept)


def _with_special_tokens(tokenizer: Any, ids: Ids) -> Ids:
    """Through text, which the tokenizer begins as it begins every text."""
    if ids[0] != tokenizer.bos_token_id:
        return ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return (tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"])


def _through_text(tokenizer: Any, ids: Ids) -> Ids:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _without_thoughts(tokenizer: Any, ids: Ids) -> Ids:
    """The template leaves the reasoning of earlier turns out when it renders the next one."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if "<think>" not in text:
        return ids
    head, _, rest = text.partition("<think>")
    return tuple(tokenizer(head + rest.partition("</think>")[2], add_special_tokens=False)["input_ids"])


PROMPTS = (
    reenacted("verl#6921", lambda engine: OtherIds(engine, _without_separators), prompts=conversations),
    reenacted("vllm#27486", lambda engine: OtherIds(engine, _with_special_tokens), prompts=after_bos),
    reenacted("trl#5224", lambda engine: OtherIds(engine, _through_text), prompts=sampled_histories),
    reenacted("prime-rl#1334", lambda engine: OtherIds(engine, _without_thoughts), prompts=conversations),
)
