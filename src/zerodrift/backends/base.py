"""The one protocol that every engine is seen through. Adapters translate; they never decide.

A backend says what it can do; a probe that needs more is INCONCLUSIVE, never passed. Nothing here imports an
engine: engines with conflicting pins live in their own environments and are spoken to as their users do.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from zerodrift.core.completion import Answer, EngineFingerprint
from zerodrift.core.errors import CapabilityMissing, EngineRefused
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion


class Capability(StrEnum):
    """What a backend can do beyond generating from token ids with sampled-token logprobs."""

    TOP_LOGPROBS = "top-logprobs"
    SCORE = "score"
    """Raw logprobs of given tokens, without sampling."""
    SEED = "seed"
    TOKENIZE = "tokenize"
    """Turns text and chat messages into ids itself, and shows the ids."""
    CACHE_SALT = "cache-salt"
    CACHED_TOKENS = "cached-tokens"
    """Says how many prompt tokens came from a prefix cache."""
    RESET_CACHE = "reset-cache"
    LOAD_WEIGHTS = "load-weights"
    WEIGHT_VERSION = "weight-version"
    EFFECTIVE_CONFIG = "effective-config"
    """Shows the settings in force, not only those asked for."""
    STREAM = "stream"
    """Sends token ids while they are made; what it sends with them is for a probe to see."""


class Backend(Protocol):
    """An engine, as the auditor sees it."""

    name: str
    """The engine whose fixes apply: `vllm`, `reference`, …"""
    capabilities: frozenset[Capability]
    max_model_len: int
    """Prompt and output together."""

    def fingerprint(self) -> EngineFingerprint:
        """Who computes the numbers; read from the engine's effective configuration where it shows one."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in request order; all requests are in flight together."""
        ...

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """As `generate`, of answers put together from the deltas of a stream. Needs STREAM."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence. Needs SCORE."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids that the engine makes of plain text. Needs TOKENIZE."""
        ...

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids that the engine makes of chat messages, with what begins an answer or without. Needs TOKENIZE."""
        ...

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Replace the weights by those of a checkpoint directory, and touch no cache. Needs LOAD_WEIGHTS."""
        ...

    def reset_cache(self) -> None:
        """Forget every cached prefix; raises if the engine says that it did not. Needs RESET_CACHE."""
        ...

    def close(self) -> None:
        """Give back what was taken: connections, processes, memory. Safe to call twice."""
        ...


class OwnTokenizer:
    """What an engine in this process makes of text, by the checkpoint's own tokenizer and template."""

    own_tokenizer: Any

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the tokenizer does by default, special tokens included."""
        return tuple(self.own_tokenizer(text)["input_ids"])

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """The checkpoint's own chat template."""
        try:
            rendered = self.own_tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generation_prompt, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program of the checkpoint, and fails in any way it likes
            what = str(error).partition("\n")[0]
            raise EngineRefused(f"the chat template does not take these messages ({what})") from error
        return tuple(rendered["input_ids"])


def need(backend: Backend, capability: Capability, hint: str) -> None:
    """Raise with what would enable `capability`, unless the backend has it."""
    if capability not in backend.capabilities:
        raise CapabilityMissing(f"{backend.name} cannot {capability}: {hint}")
