"""How much may one client ask for? Each number is checked before memory is taken for what it counts. Torch-free."""

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue

HEADER_BYTES = 32 * 1024
HEAD_S = 10.0
"""For a request line and its headers, from the first byte on: a browser needs milliseconds, a slow-loris for ever."""
BODY_S = 60.0
"""For a whole body."""
STALLED_S = 30.0
"""A client that reads nothing of a stream for so long is gone."""
QUERY_BYTES = 2048
NO_BODY_BYTES = 64
"""Of routes that take none: some clients send `{}`, or `null`."""
LARGE_BODY_BYTES = 64 * 1024
"""From here on a body is read in another thread: 8 MiB of nested lists took 0.9 s, and everybody waited."""
LARGE_WORK = 64 * 1024
"""Characters to tokenize, or numbers to write: from here on in threads of their own. Three texts of 3 MB, 9 s each, had everybody wait for 30 s."""
MOST_PARTS = 64 * 1024
"""Lists, objects and members of objects in a body, counted before it is read: 8 MiB of empty lists held the interpreter for 4 s."""
MOST_CHARACTERS = 1024
"""Of a request id, a cache salt, a model's name."""


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of one server; over → 400, 413 or 429."""

    body_bytes: int = 8 * 2**20
    """512 prompts of 2,000 tokens are 6 MiB of JSON."""
    bodies_bytes: int = 64 * 2**20
    """Of all bodies that are held together."""
    connections: int = 1024
    """Beyond it whoever generates is told to come again, and probes and trainers are not; twice as many, and new ones are cut."""
    prompts: int = 1024
    """In one request; TRL sends a whole batch as one."""
    samples: int = 2048
    """Prompts times n."""
    logprobs: int = 100
    """Alternatives per token, as vLLM's --max-logprobs; TRL's distillation asks for 100."""
    numbers: int = 10_000_000
    """Logprobs in one answer, alternatives and those of prompts included: 300 MB of JSON."""
    stops: int = 16
    biases: int = 1024
    messages: int = 1024
    loras: int = 16
    """Adapters that are held together; TRL wants two more than versions that a sample may be old."""
    lora_rank: int = 64
    control_calls: int = 8
    """Control calls that wait together."""
    request_s: float = 3600.0
    """From a request to its answer; a pause counts."""
    drain_s: float = 60.0
    """From SIGTERM until what is still in flight is aborted."""

    def __post_init__(self) -> None:
        """Each allows something."""
        for name in self.__struct_fields__:
            value, what, rule = getattr(self, name), f"limit {name}", "it is a positive size"
            if name.endswith("_s"):
                require.real(InvalidValue, what, value, rule, 0.1)
            else:
                require.whole(InvalidValue, what, value, rule, 1)
