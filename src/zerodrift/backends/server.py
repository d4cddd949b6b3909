"""What every adapter of a running server does alike: ask in parallel, refuse what cannot be asked, bind samples.

An adapter adds what one call looks like and how its answer is read. What the server can do is found by asking it when
we connect, never by its version string: forks, back-ports and flags all lie there.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from zerodrift.backends.base import Backend, Capability, need
from zerodrift.backends.http import HttpClient
from zerodrift.backends.stream_deltas import Joined
from zerodrift.core.completion import Answer, Completion, Problem
from zerodrift.core.errors import BadAnswer, InvalidPrompt, ModelNotFound, ZerodriftError
from zerodrift.core.request import Prompt, Request
from zerodrift.core.version import WeightVersion
from zerodrift.models import directory as model_directory

Raw = TypeVar("Raw")

UNKNOWN = WeightVersion("unknown")


class ServerBackend(Backend):
    """One model of one server. A request is one HTTP call, or one for each sample; the server makes the batches."""

    model: str
    hints: Mapping[Capability, str]
    """What to type where a capability is missing."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, concurrency: int) -> None:
        # OpenAI clients are given the address with /v1, so people paste it so.
        address = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(address, api_key=api_key, timeout_s=timeout_s, concurrency=concurrency)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests in flight together, `concurrency` at a time. `sampling` is reported as it was asked for."""
        return self._ask(requests, lambda request: Joined(self.complete(request), deltas=0))

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """All streams open together, `concurrency` at a time."""
        self._need(Capability.STREAM)
        return self._ask(requests, self.complete_by_stream)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs, as the server makes them of a prompt that it does not go on with."""
        self._need(Capability.SCORE)
        prompts = [Prompt(tuple(sequence)) for sequence in sequences]
        for prompt in prompts:
            self._check_length(len(prompt.token_ids), 1)
        return self._http.each(self.score_one, [prompt.token_ids for prompt in prompts])

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """Have the server read `directory` itself, under the label `version` where it keeps one.

        It is looked at here first: servers read pickles where they find nothing better, and vLLM, which has no
        rollback, dies of a directory that it cannot read.
        """
        self._need(Capability.LOAD_WEIGHTS)
        directory = directory.resolve()
        if not directory.is_dir():
            raise ModelNotFound(f"{directory} is no directory; the engine would die of reading it")
        model_directory.check(directory)
        self.push_weights(directory, version)

    def close(self) -> None:
        """The server is not ours and runs on. Safe to call twice."""
        self._http.close()

    @abstractmethod
    def complete(self, request: Request) -> object | None:
        """The answer to one call, as it came."""

    @abstractmethod
    def complete_by_stream(self, request: Request) -> Joined:
        """The answer to one call, put together from a stream."""

    @abstractmethod
    def score_one(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raw logprobs of one sequence, but its first token."""

    @abstractmethod
    def push_weights(self, directory: Path, version: WeightVersion) -> None:
        """As `load_weights`, of a directory that was looked at."""

    @abstractmethod
    def _ask(self, requests: Sequence[Request], call: Callable[[Request], Joined]) -> list[Answer]:
        """The requests sent by `call`, and what came back read."""

    def _check(self, request: Request) -> None:
        """What the server would ignore or cut down in silence is refused before it is sent."""
        sampling = request.sampling
        self._check_length(len(request.prompt.token_ids), sampling.max_tokens)
        for capability, asked_for in (
            (Capability.SEED, sampling.seed is not None),
            (Capability.CACHE_SALT, request.prompt.cache_salt is not None),
            (Capability.TOP_LOGPROBS, bool(sampling.logprobs)),
            (Capability.SCORE, sampling.prompt_logprobs is not None),
        ):
            if asked_for:
                self._need(capability)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self.max_model_len:
            raise InvalidPrompt(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed max_model_len="
                f"{self.max_model_len}; shorten one of the two, or start the server with a larger one"
            )

    def _need(self, capability: Capability) -> None:
        need(self, capability, self.hints[capability])


def has_route(http: HttpClient, path: str, method: str) -> bool:
    """One that takes other methods than `method` answers 405 and does nothing; one that is not there answers 404.

    What a gateway says of routes that it does not let through may be anything, and is no failure of the server.
    """
    return http.exchange(method, path).status == 405


def bind_samples(
    numbered: Sequence[tuple[int, Raw]], request: Request, where: str, read: Callable[[Raw, int], Completion]
) -> Answer:
    """Every sample of one request, in order of its index; one that cannot be read is a `Problem` of its own."""
    expected, by_index = range(request.sampling.n), dict(numbered)
    if len(numbered) != len(expected) or set(by_index) != set(expected):
        raise BadAnswer(
            f"{where} was asked for {len(expected)} samples and answered with {len(numbered)}, of the indices "
            f"{sorted(by_index)}; each must come once"
        )
    completions, problems = [], []
    for index in expected:
        try:
            completions.append(read(by_index[index], index))
        except ZerodriftError as error:
            problems.append(Problem(error.code, f"sample {index}: {error}"))
    return Answer(tuple(completions), tuple(problems))


def shorten(ids: Iterable[int] | None) -> str:
    """Ids for a message."""
    shown = str(ids if ids is None else list(ids))
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
