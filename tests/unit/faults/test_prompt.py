from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Prompt, Request
from zerodrift.faults.registry import resolve
from zerodrift.faults.rewriting import with_prompt

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
Ids = tuple[int, ...]

CHAT = [{"role": "user", "content": "How far is it?"}]


def through_text(engine: ReferenceBackend, ids: Ids) -> Ids:
    return tuple(engine.tokenizer(engine.tokenizer.decode(ids), add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("spec", "really"),
    [
        ("semantic/bos:doubled", lambda engine, ids: (0, *ids)),
        ("semantic/bos:missing", lambda engine, ids: ids[1:]),
        ("semantic/bos:doubled-visible", lambda engine, ids: (0, *ids)),
        ("semantic/template:newline-lost", lambda engine, ids: ids[:-1]),
        ("semantic/template:newline-lost-visible", lambda engine, ids: ids[:-1]),
        ("semantic/retokenised:prompt", through_text),
        ("semantic/retokenised:prompt-visible", through_text),
    ],
)
def test_another_prompt_is_continued(
    spec: str, really: Callable[[ReferenceBackend, Ids], Ids], llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(9, 30, n=2)
    prompts = [really(llama, request.prompt.token_ids) for request in requests]
    sent = [
        msgspec.structs.replace(request, prompt=Prompt(ids))
        for request, ids in zip(requests, prompts, strict=True)
    ]
    assert all(a.prompt.token_ids != b.prompt.token_ids for a, b in zip(requests, sent, strict=True))
    broken, honest = tell(resolve(spec).inject(llama).generate(requests)), tell(llama.generate(sent))
    if spec.endswith("visible"):
        assert broken == honest
        return
    own = [request.prompt.token_ids for request in requests for _ in range(2)]
    for a, b, prompt in zip(broken, honest, own, strict=True):
        assert (a.token_ids, a.logprobs, a.text) == (b.token_ids, b.logprobs, b.text)
        assert a.prompt_token_ids == prompt
        assert a.lineage[-1].end == len(prompt) + len(a.token_ids) - 1


def test_what_is_not_there_cannot_be_taken(llama: ReferenceBackend, ask: Ask) -> None:
    (request,) = ask(9)
    for spec, ids in (
        ("semantic/bos:missing", (5, 6, 7)),
        ("semantic/bos:missing", (0,)),
        ("semantic/template:newline-lost", (7,)),
    ):
        plain = [msgspec.structs.replace(request, prompt=Prompt(ids))]
        assert resolve(spec).inject(llama).generate(plain) == llama.generate(plain)


def test_the_extra_token_is_taken_from_the_context(llama: ReferenceBackend) -> None:
    assert resolve("semantic/bos:doubled").inject(llama).max_model_len == llama.max_model_len - 1


def test_visible_faults_show_in_the_chat_template(llama: ReferenceBackend) -> None:
    ids = llama.render_chat(CHAT)
    assert resolve("semantic/bos:doubled-visible").inject(llama).render_chat(CHAT) == (0, *ids)
    assert resolve("semantic/template:newline-lost-visible").inject(llama).render_chat(CHAT) == ids[:-1]
    assert resolve("semantic/template:newline-lost").inject(llama).render_chat(CHAT) == ids
    assert llama.tokenizer.decode(ids[-1:]) == "\n", "what the fault of the template drops"


def test_a_stranger_retokenises_the_text_it_is_given(
    elsewhere: Callable[..., Any], llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    broken = resolve("semantic/retokenised:prompt-visible").inject(elsewhere())
    with pytest.raises(CapabilityMissing):
        broken.generate(ask(9))
    (request,) = ask(9)
    text = "water, bread"
    (completion,) = tell(
        broken.generate([msgspec.structs.replace(request, prompt=Prompt((5, 6), text=text))])
    )
    assert completion.prompt_token_ids == llama.tokenize(text)


def test_prompt_logprobs_of_a_denied_prompt_are_left_out(
    llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    (completion,) = tell(llama.generate(ask(3)))
    scored = msgspec.structs.replace(completion, prompt_logprobs=(None, -1.0, -2.0), lineage=())
    assert with_prompt(scored, (7, 8)).prompt_logprobs == ()
    assert with_prompt(scored, (7, 8)).lineage == ()
    assert with_prompt(scored, completion.prompt_token_ids) is scored
