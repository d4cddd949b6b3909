from typing import Any

import msgspec
import pytest

from zerodrift.audit.recorded.prompts import ChatFrame, frame_of, other_prompts, rendered, system_prompts
from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import Message, RecordedRollout
from zerodrift.records.verdict import Outcome

WORDS = ["count to", "a cat", "the sea", "why", "rain", "bread and", "say it", "north"]
TERSE = Message("system", "be terse")
STEPS, EACH = 4, 6


def ids(tokenizer: Any, *turns: Message) -> tuple[int, ...]:
    return tuple(tokenizer(rendered(tokenizer, turns), add_special_tokens=False)["input_ids"])


def asked(number: int) -> Message:
    return Message("user", f"{WORDS[number % len(WORDS)]} {number}")


def test_a_template_taken_apart(reference):
    frame = frame_of(reference.tokenizer)
    assert frame == ChatFrame(
        before_system="<|im_start|>system\n",
        after_system="<|im_end|>\n<|im_start|>user\n",
        header="<|im_start|>user\n",
        default="<|im_start|>user\n",
        closing="<|im_end|>\n",
        behind="<|im_end|>\n<|im_start|>assistant\n",
    )
    assert frame.words("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU" + frame.behind) == ("S", "U")
    assert frame.words("<|im_start|>user\nU" + frame.behind) == (None, "U")
    assert frame.words("U") is None
    assert frame.words("U" + frame.behind) is None


class Untemplated:
    chat_template = None


def test_no_template(reference):
    assert frame_of(Untemplated()) is None
    rollout = RecordedRollout(
        source="d", line=1, prompt=(5, 6), output=(7,), logprobs=(-1.0,), sampling=SamplingParams()
    )
    assert list(other_prompts(reference.tokenizer, None, rollout, [])) == []
    assert system_prompts(reference.tokenizer, None, [rollout]) == []


SEEN = {
    "without": ((TERSE,), (), "without its system prompt"),
    "with another": ((TERSE,), (Message("system", "You are a helpful assistant."),), "a helpful assistant."),
    "with one of the dump": ((), (TERSE,), "the system prompt 'be terse'"),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_prompt_that_the_engine_saw(name, engine, reference, sampled, judged):
    recorded, seen, words = SEEN[name]
    tokenizer, numbers = reference.tokenizer, range(STEPS * EACH)
    rollouts = sampled(engine, [ids(tokenizer, *seen, asked(number)) for number in numbers])
    rollouts = [
        msgspec.structs.replace(each, prompt=ids(tokenizer, *recorded, asked(number)))
        for number, each in enumerate(rollouts)
    ]
    if name == "with one of the dump":
        sound = sampled(engine, [ids(tokenizer, TERSE, asked(number)) for number in numbers], seed=50)
        rollouts = [*sound[: len(sound) // 2], *rollouts[len(sound) // 2 :]]
    blamed = judged(rollouts, reference)
    assert blamed.record.verdict is Outcome.FAIL
    assert (blamed.record.causes[0].cause, blamed.record.guilty) == ("semantic/template", "engine")
    assert words in blamed.record.causes[0].evidence


def test_messages_that_say_otherwise(engine, reference, sampled, judged):
    tokenizer = reference.tokenizer
    odd = Message("system", "speak as a pirate of the north would")
    prompts = [ids(tokenizer, odd, asked(number)) for number in range(STEPS * EACH)]
    rollouts = [
        msgspec.structs.replace(each, prompt=ids(tokenizer, asked(number)), messages=(odd, asked(number)))
        for number, each in enumerate(sampled(engine, prompts))
    ]
    blamed = judged(rollouts, reference)
    assert blamed.record.causes[0].cause == "semantic/template"
    assert "messages" in blamed.record.causes[0].evidence


def test_a_sound_dump_with_messages(engine, reference, sampled, judged):
    tokenizer = reference.tokenizer
    prompts = [ids(tokenizer, TERSE, asked(number)) for number in range(STEPS * EACH)]
    rollouts = [
        msgspec.structs.replace(each, messages=(asked(number),), text="something else")
        for number, each in enumerate(sampled(engine, prompts))
    ]
    blamed = judged(rollouts, reference)
    assert (blamed.record.verdict, blamed.record.causes) == (Outcome.PASS, ())
