"""The routes by which vLLM generates from ids: each is a module with the same names, so the adapter asks either alike."""

from collections.abc import Mapping
from typing import Any, Protocol

from zerodrift.backends import vllm_generate, vllm_wire
from zerodrift.backends.http import Reply
from zerodrift.backends.pieces import Streaming
from zerodrift.core.completion import Answer
from zerodrift.core.errors import EngineRefused
from zerodrift.core.request import Request


class Route(Protocol):
    """How to ask, and how to read what comes back."""

    PATH: str
    CLOSED: frozenset[int]
    """Statuses that mean that the route is switched off."""
    ONE_ALTERNATIVE: int
    """What `logprobs` asks for one alternative."""
    MUST_READ: Any
    """Names of flags without which alternatives have no ids."""
    STREAMING: Streaming

    def request_body(self, request: Request, model: str, *, explicit: bool) -> dict[str, object]:
        """The JSON of one call."""
        ...

    def score_body(self, token_ids: tuple[int, ...], model: str) -> dict[str, object]:
        """A call that scores its own prompt."""
        ...

    def probe_body(self, model: str, extra: Mapping[str, object]) -> dict[str, object]:
        """The smallest call, with what is to be found out."""
        ...

    def read_answer(self, answer: object | None, request: Request, context: vllm_wire.Context) -> Answer:
        """Every sample of one request."""
        ...

    def read_scores(self, answer: object, token_ids: tuple[int, ...]) -> list[float]:
        """Raw logprobs of tokens 1… of the sequence that was sent."""
        ...


ROUTES: Mapping[str, Route] = {"completions": vllm_wire, "generate": vllm_generate}
"""By their names in `engine.route`."""


def check_open(route: Route, address: str, reply: Reply) -> None:
    """The server lets us ask by this route."""
    if reply.status in route.CLOSED:
        raise EngineRefused(
            f"{address}{route.PATH} is not open (it answered {reply.status}): start the server with {vllm_generate.FLAG}, "
            "or leave engine.route at completions"
        )


def is_nan(reply: Reply) -> bool:
    """The server computed NaN, and could not write it."""
    return reply.status == 400 and vllm_wire.NAN_REFUSAL.encode() in reply.body
