import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerodrift.audit.prompts import (
    FARTHEST,
    FORKS,
    LENGTHS,
    PARTED,
    PARTINGS,
    SENTENCES,
    assorted,
    from_file,
    generated,
    id_lists,
    nearly_alike,
    texts,
    tokenise,
)
from zerodrift.core.errors import InvalidPrompt, RecordError, ZerodriftError
from zerodrift.core.request import Prompt
from zerodrift.models import tokenizer_testbed
from zerodrift.models.testbed_config import VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_testbed.build()


class Speechless:
    """A tokenizer without BOS that makes no token of whitespace, as some do."""

    all_special_ids = (0,)
    bos_token_id = None
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % 3 for letter in text if not letter.isspace()]}


def test_the_same_seed_gives_the_same_prompts(tokenizer):
    first = generated(tokenizer, VOCAB_SIZE, 200, 24, seed=3)
    assert generated(tokenizer, VOCAB_SIZE, 200, 24, seed=3) == first
    assert generated(tokenizer, VOCAB_SIZE, 200, 24, seed=4) != first


def test_the_same_seed_gives_the_same_prompts_in_another_program(tmp_path):
    """Hypothesis by itself draws literals of the modules that happen to be loaded: here it must not."""
    (tmp_path / "neighbour.py").write_text(
        "A = ['odd literal', 'another one', 'zzqq']\nB = [77, 133, 255, 301, 402, 499]\n"
    )
    script = (
        "import neighbour, json\n"
        "from zerodrift.audit.prompts import generated\n"
        f"{inspect.getsource(Speechless)}\n"
        "prompts = generated(Speechless(), 512, 200, 60, 0)\n"
        "print(json.dumps([[prompt.token_ids, prompt.text] for prompt in prompts]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    ours = generated(Speechless(), 512, 200, 60, seed=0)
    assert json.loads(run.stdout) == [[list(prompt.token_ids), prompt.text] for prompt in ours]


def renderings(tokenizer: Any, text: str) -> list[list[int]]:
    """What trainers make of a text."""
    plain = tokenizer(text)["input_ids"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return [plain, [tokenizer.bos_token_id, *plain], tokenizer(chat)["input_ids"]]


def test_prompts_differ_and_cover_texts_and_lengths(tokenizer):
    prompts = generated(tokenizer, VOCAB_SIZE, 200, 64, seed=0)
    assert len(prompts) == 64
    assert len({prompt.token_ids for prompt in prompts}) == 64
    from_text = [prompt for prompt in prompts if prompt.text is not None]
    assert 16 <= len(from_text) <= 56
    ways = [renderings(tokenizer, prompt.text or "").index(list(prompt.token_ids)) for prompt in from_text]
    assert set(ways) == {0, 1, 2}, "plain text, text after a BOS, and chat"
    random = {len(prompt.token_ids) for prompt in prompts if prompt.text is None}
    assert random <= set(LENGTHS)
    assert len(random) >= 5
    assert any(sentence in (prompt.text or "") for prompt in prompts for sentence in SENTENCES)


@pytest.mark.parametrize("longest", [1, 2, 16, 130])
def test_no_prompt_is_longer_than_allowed(tokenizer, longest):
    prompts = generated(tokenizer, VOCAB_SIZE, longest, 20, seed=1)
    assert len(prompts) == 20
    assert max(len(prompt.token_ids) for prompt in prompts) <= longest


def test_random_ids_are_of_the_model_and_none_is_special(tokenizer):
    special = set(tokenizer.all_special_ids)
    for prompt in generated(tokenizer, VOCAB_SIZE, 64, 40, seed=2):
        prompt.check_vocabulary(VOCAB_SIZE)
        if prompt.text is None:
            assert not special & set(prompt.token_ids)


def test_where_there_are_fewer_than_asked_for_they_repeat():
    """Four tokens, one of them special, one position."""
    prompts = generated(Speechless(), 4, 1, 12, seed=0)
    assert len(prompts) == 12
    assert {prompt.token_ids for prompt in prompts} == {(1,), (2,), (3,)}


def test_texts_that_make_no_token_are_not_drawn():
    prompts = generated(Speechless(), 60, 300, 60, seed=0)
    assert all(prompt.token_ids for prompt in prompts)
    assert any(prompt.text is not None for prompt in prompts)


@pytest.mark.parametrize(("longest", "count"), [(0, 4), (-3, 4), (16, 0), (16, -1)])
def test_no_room_or_nothing_to_draw(tokenizer, longest, count):
    with pytest.raises(InvalidPrompt, match="at least one"):
        generated(tokenizer, VOCAB_SIZE, longest, count, seed=0)


def test_strategies_are_strategies():
    assert texts().filter(bool) is not None
    assert id_lists(10, 20, (0,)) is not None


def test_no_token_of_a_text():
    with pytest.raises(InvalidPrompt, match="the tokenizer makes no token of ' '"):
        tokenise(Speechless(), " ")


# --- files ------------------------------------------------------------------------------------------------------


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_texts_ids_and_messages_are_read(tokenizer, tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Où est le phare ?", "answer": "là"},
        {"prompt": [5, 6, 7]},
        {"prompt_token_ids": [5, 6, 7]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    )
    text, ids, same, chat = from_file(path, tokenizer, 100, 10)
    assert text == Prompt(tuple(tokenizer("Où est le phare ?")["input_ids"]), "Où est le phare ?")
    assert ids == same == Prompt((5, 6, 7))
    assert tokenizer.decode(chat.token_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_blank_lines_and_a_missing_last_newline_are_fine(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": [5]}\n   \n{"prompt": [6]}')
    assert from_file(path, tokenizer, 9, 9) == [Prompt((5,)), Prompt((6,))]


def test_only_so_many_are_read(tokenizer, tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": [5] * length} for length in (3, 1, 2)))
    with path.open("a") as file:
        file.write("this line is never reached\n")
    assert [len(prompt.token_ids) for prompt in from_file(path, tokenizer, 3, 3)] == [3, 1, 2]


def test_one_that_is_too_long_is_not_dropped_in_silence(tokenizer, tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": [5] * length} for length in (3, 9)))
    with pytest.raises(InvalidPrompt, match=r"p.jsonl, line 2: a prompt of 9 tokens, .* room for 3; shorten"):
        from_file(path, tokenizer, 3, 3)


BAD_LINES: list[tuple[bytes, str]] = [
    (b"oops", "not JSON"),
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'"text"', "no `prompt`"),
    (b"5", "no `prompt`"),
    (b"{}", "no `prompt`"),
    (b'{"prompt": [5], "messages": []}', "both `prompt` and `messages`"),
    (b'{"prompt": "a", "prompt_token_ids": [5]}', "both `prompt` and `prompt_token_ids`"),
    (b'{"text": "hi"}', "no `prompt`"),
    (b'{"prompt": null}', "no `prompt`"),
    (b'{"prompt": []}', "no `prompt`"),
    (b'{"prompt": [1.5]}', "no `prompt`"),
    (b'{"prompt": [true]}', r"prompt\[0\] is True|no `prompt`"),
    (b'{"prompt": [3, -1]}', r"prompt\[1\] is -1"),
    (b'{"prompt": [3, 512]}', r"prompt\[1\] is 512, but the model has 512 tokens"),
    (b'{"prompt": ""}', "makes no token of ''"),
    (b'{"prompt": "\\ud800"}', "no text|surrogate"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b'{"messages": []}', "chat template"),
    (b'{"messages": [1, 2]}', "chat template"),
    (b'{"messages": [{"role": "user"}]}', "chat template"),
    (b'{"messages": "hi"}', "no `prompt`"),
]


@pytest.mark.parametrize(("line", "says"), BAD_LINES)
def test_a_bad_line_is_refused_by_number(tokenizer, tmp_path, line, says):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": [5]}\n\n' + line + b"\n")
    with pytest.raises(ZerodriftError, match=rf"p\.jsonl, line 3: .*({says})") as caught:
        from_file(path, tokenizer, 64, 10, VOCAB_SIZE)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_template(tmp_path):
    bare = tokenizer_testbed.build()
    bare.chat_template = None
    path = write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(RecordError, match=r"line 1: .*chat template.*give `prompt`"):
        from_file(path, bare, 64, 10)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_a_prompt(tokenizer, tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"p.jsonl holds no prompt"):
        from_file(path, tokenizer, 2, 10)


def test_no_such_file(tokenizer, tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(
            RecordError, match=r"there is no prompt file .*; give a JSON-lines file with `prompt`"
        ):
            from_file(path, tokenizer, 9, 9)


# --- prompts that nearly agree, and long ones --------------------------------------------------------------------


def differing(first: Prompt, second: Prompt) -> list[int]:
    pairs = zip(first.token_ids, second.token_ids, strict=True)
    return [place for place, (one, other) in enumerate(pairs) if one != other]


def test_prompts_that_nearly_agree_part_inside_a_block_and_at_its_edges():
    base, *others = nearly_alike(VOCAB_SIZE, 1000, (0, 1, 2), 8, seed=4)
    assert len(base.token_ids) == PARTED
    assert [differing(base, other) for other in others[:4]] == [[place] for place in PARTINGS]
    for place, fork in zip(FORKS, others[4:], strict=True):
        apart = differing(base, fork)
        assert place <= apart[0] < place + 3, "random ids may agree by chance"
        assert len(apart) > 0.9 * (PARTED - place)
    for block in (16, 128):
        within = {place % block for place in (*PARTINGS, *FORKS)}
        assert {0, block - 1} < within, "first, last, and between"
    assert not {0, 1, 2} & {token for prompt in (base, *others) for token in prompt.token_ids}


@pytest.mark.parametrize(("longest", "prompts"), [(20, 0), (25, 0), (26, 3), (150, 7), (272, 8)])
def test_as_many_as_the_context_has_room_for(longest, prompts):
    alike = nearly_alike(VOCAB_SIZE, longest, (), 8, seed=4)
    assert len(alike) == prompts
    assert all(len(prompt.token_ids) <= longest for prompt in alike)


def test_an_audit_asks_to_the_end_of_the_context_and_mixes_lengths(tokenizer):
    prompts = assorted(tokenizer, VOCAB_SIZE, 992, 32, 32, seed=0)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert len(prompts) == 32
    assert max(lengths) == 992, "with 32 tokens of output that is a context of 1,024"
    assert sorted(lengths)[-2:] == [496, 992]
    assert lengths.count(PARTED) == 8
    # Asked again where 64 trials are dealt over 32 prompts, seven of which draw two.
    assert max(place for place, length in enumerate(lengths) if length >= PARTED) < 25
    assert max(lengths[:8]) == PARTED
    for batch in (lengths[:16], lengths[16:]):
        assert max(batch) > 4 * min(batch)
    assert prompts == assorted(tokenizer, VOCAB_SIZE, 992, 32, 32, seed=0)
    far = assorted(tokenizer, VOCAB_SIZE, 100_000, 32, 32, seed=0)
    assert max(len(prompt.token_ids) for prompt in far) == FARTHEST - 32


@pytest.mark.parametrize(("count", "room"), [(1, 900), (3, 50), (6, 900), (32, 10), (40, 300)])
def test_few_prompts_and_short_contexts_still_get_as_many_as_were_asked_for(tokenizer, count, room):
    prompts = assorted(tokenizer, VOCAB_SIZE, room, 8, count, seed=0)
    assert len(prompts) == count
    assert max(len(prompt.token_ids) for prompt in prompts) <= room
