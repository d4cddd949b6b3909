"""Faults of the prompt: the engine continues other ids than those it was sent.

A hidden variant claims the ids that were sent; a visible one shows those that it used, in its answers and in what
it makes of chat messages.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Prompt, Request
from zerodrift.faults.rewriting import rewrite, with_prompt
from zerodrift.faults.wrapper import FaultyBackend, Plant, fact_of, innermost

Ids = tuple[int, ...]


class OtherPrompt(FaultyBackend):
    """Continues `change(prompt)`, and shows it or not."""

    def __init__(
        self, inner: Backend, change: Callable[[Prompt], Ids], *, visible: bool, longer: int = 0
    ) -> None:
        """`longer` is how many tokens `change` adds at most: they are taken from the context."""
        super().__init__(inner)
        self._change = change
        self._visible = visible
        self.max_model_len -= longer

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Sent changed; a hidden variant answers as if not."""
        sent = [
            msgspec.structs.replace(
                request,
                prompt=msgspec.structs.replace(request.prompt, token_ids=self._change(request.prompt)),
            )
            for request in requests
        ]
        answers = self.inner.generate(sent)
        if self._visible:
            return answers
        return rewrite(requests, answers, lambda request, each: with_prompt(each, request.prompt.token_ids))

    def render_chat(self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True) -> Ids:
        """A visible variant shows here, too, what it does to prompts."""
        ids = self.inner.render_chat(messages, generation_prompt=generation_prompt)
        return self._change(Prompt(ids)) if self._visible else ids


def _doubled_bos(engine: Backend, *, visible: bool) -> Backend:
    bos: int = fact_of(engine, "bos_token_id")
    return OtherPrompt(engine, lambda prompt: (bos, *prompt.token_ids), visible=visible, longer=1)


def _missing_bos(engine: Backend) -> Backend:
    bos = fact_of(engine, "bos_token_id")

    def drop(prompt: Prompt) -> Ids:
        ids = prompt.token_ids
        return ids[1:] if ids[0] == bos and len(ids) > 1 else ids

    return OtherPrompt(engine, drop, visible=False)


def _lost_end(engine: Backend, *, visible: bool) -> Backend:
    # A prompt of one token has nothing to lose.
    return OtherPrompt(engine, lambda prompt: prompt.token_ids[:-1] or prompt.token_ids, visible=visible)


def _retokenised(engine: Backend, *, visible: bool) -> Backend:
    tokenizer = getattr(innermost(engine), "tokenizer", None)

    def through_text(prompt: Prompt) -> Ids:
        if tokenizer is not None:
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if prompt.text is None:
            raise CapabilityMissing(
                f"{engine.name} cannot turn ids to text; give prompts with their text, or use the reference engine"
            )
        return engine.tokenize(prompt.text)

    return OtherPrompt(engine, through_text, visible=visible)


class OtherTokenizer(FaultyBackend):
    """Encodes text with a vocabulary in another order; ids that are sent stay as they are."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As many ids as the right ones, and others."""
        return tuple(token ^ 1 for token in self.inner.tokenize(text))


PROMPT_FAULTS: Mapping[str, Plant] = {
    "semantic/bos:doubled": lambda engine: _doubled_bos(engine, visible=False),
    "semantic/bos:missing": _missing_bos,
    "semantic/bos:doubled-visible": lambda engine: _doubled_bos(engine, visible=True),
    "semantic/template:newline-lost": lambda engine: _lost_end(engine, visible=False),
    "semantic/template:newline-lost-visible": lambda engine: _lost_end(engine, visible=True),
    "semantic/retokenised:prompt": lambda engine: _retokenised(engine, visible=False),
    "semantic/retokenised:prompt-visible": lambda engine: _retokenised(engine, visible=True),
    "semantic/tokenizer:another-order": OtherTokenizer,
}
