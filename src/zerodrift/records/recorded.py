"""One rollout as somebody else recorded it: the tokens, the behaviour logprobs, and as much else as the dump says.

A recorded rollout that cannot be judged cannot be built: every output token has one finite logprob, and the trainer's
numbers, where they are there, stand beside the same tokens. What the dump does not say is None, or is listed as not
stated; nothing is made up here.
"""

from typing import NamedTuple

import msgspec

from zerodrift.core import require
from zerodrift.core.completion import FinishReason, LogprobKind, check_logprobs
from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.request import SamplingParams

NO_LOGPROB = 1e-4
"""A softmax in fp32 may round to a hair above zero; a number above this is no log-probability."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class RecordedRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sampled sequence out of a dump."""

    source: str
    """Name of the file it stood in."""
    line: int
    """Counted from 1. Several rollouts may share a line: the turns of one conversation."""
    step: int | None = None
    """Of training, as the dump numbers them."""
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour logprob of each output token: what the engine reported."""
    sign_turned: bool = False
    """The dump's numbers are all above zero, −log p or p; `logprobs` holds them with a minus sign."""
    kind: LogprobKind | None = None
    """Which distribution the dump claims they belong to."""
    sampling: SamplingParams
    """As far as the dump states them; the others are the reader's defaults."""
    stated: frozenset[str] = frozenset()
    """Names of the parameters in `sampling` that the dump states, or its reader vouches for."""
    trainer_logprobs: tuple[float, ...] | None = None
    """The trainer's own numbers for the same tokens under the same parameters."""
    version: str | None = None
    """Label of the weights that are said to have made it."""
    model: str | None = None
    text: str | None = None
    """The prompt as text, where the dump has it beside the ids."""
    messages: tuple[Message, ...] = ()
    """The conversation that the prompt was rendered from, likewise."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """What no engine can have done is refused."""
        require.whole(InvalidValue, "line", self.line, "lines count from 1", 1)
        if self.step is not None:
            require.whole(InvalidValue, "step", self.step, "steps count from 0", 0)
        require.instance(InvalidCompletion, "sampling", self.sampling, SamplingParams)
        require.instance(InvalidCompletion, "kind", self.kind, LogprobKind | None)
        require.instance(InvalidCompletion, "finish_reason", self.finish_reason, FinishReason | None)
        require.token_ids(InvalidCompletion, "prompt ids", self.prompt)
        require.token_ids(InvalidCompletion, "output ids", self.output)
        if not self.prompt:
            raise InvalidCompletion("the prompt is empty; the first token of a sequence cannot be scored")
        _check_numbers("logprobs", self.logprobs, len(self.output))
        if self.trainer_logprobs is not None:
            _check_numbers("trainer_logprobs", self.trainer_logprobs, len(self.output))

    @property
    def where(self) -> str:
        """File and line, as messages name them."""
        return f"{self.source}, line {self.line}"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Every id exists in a model of `vocab_size` tokens."""
        for name, ids in (("prompt", self.prompt), ("output", self.output)):
            worst = max(ids, default=0)
            if worst >= vocab_size:
                raise InvalidCompletion(
                    f"{name} ids hold {worst}, but the model has {vocab_size} tokens; "
                    "the rollout belongs to another model"
                )
        self.sampling.check_vocabulary(vocab_size)

    def check_length(self, context_length: int) -> None:
        """Prompt and output fit into a model of `context_length` positions."""
        length = len(self.prompt) + len(self.output)
        if length > context_length:
            raise InvalidCompletion(
                f"prompt and output are {length} tokens, and the model has {context_length} positions; the rollout "
                "belongs to another model, or to a longer context, which config.json has to state"
            )


def _check_numbers(name: str, values: tuple[float, ...], tokens: int) -> None:
    require.a_tuple(InvalidCompletion, name, values)
    if len(values) != tokens:
        raise InvalidCompletion(f"{tokens} output tokens carry {len(values)} {name}; each token needs one")
    check_logprobs(name, values)


class JudgedRollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `judged.jsonl`: which rollout of the dump a sequence of `tokens.parquet` is, and how far it is off."""

    sequence: int
    """Its number in `tokens.parquet`."""
    source: str
    line: int
    step: int | None
    version: str | None
    tokens: int
    mean: float | None
    """Mean |Δ| of the engine's numbers from the reference, in nats; None where a token is excluded by the parameters."""
    trainer_mean: float | None = None
    previous_mean: float | None = None
    """Mean |Δ| under the weights before, where they were given."""
