"""What servers call things, and where in their answers a value is: facts, so that another server is another table.

Names are paths of fields that go out and paths of values that come back (see json_path). Values are looked up in a
sample, and in the whole answer where the path begins with a slash. What a server cannot do stands in `cannot` with the
reason, and is refused before it is sent: servers ignore fields that they do not know.
"""

from collections.abc import Mapping
from enum import StrEnum

from zerodrift.backends.base import Capability
from zerodrift.backends.stream_deltas import Streaming
from zerodrift.core.completion import FinishReason, LogprobKind
from zerodrift.core.frozen import FrozenFacts


class SeedProbe(StrEnum):
    """How it is found out whether a server honours seeds."""

    NONSENSE = "nonsense"
    """A server that refuses nonsense in the field reads it."""
    REPETITION = "repetition"
    """Fields are read and then ignored: what counts is that the same seed draws the same tokens, and others others."""


class Numbers(FrozenFacts, frozen=True, kw_only=True):
    """One kind of logprob: how it is asked for, and where it comes back in a sample."""

    ask: Mapping[str, object] = {}
    owners: str | None
    """Ids of the tokens that the values belong to; None where the server does not say, and only their number counts."""
    values: str
    alternative_ids: str | None = None
    """Of each token, likeliest first; None where alternatives come without ids."""
    alternative_values: str = ""
    probabilities: bool = False
    """The values are probabilities, and their logarithms are wanted."""


class Scoring(FrozenFacts, frozen=True, kw_only=True):
    """How given tokens are scored: a call that generates nothing, and where the prompt's raw logprobs come back."""

    ask: Mapping[str, object]
    owners: str
    values: str
    """One for each token of the prompt; that of the first is not looked at."""
    nameless: int
    """The id that the server writes where it does not name a token."""


class Updating(FrozenFacts, frozen=True, kw_only=True):
    """How a running server takes a checkpoint, and where it shows the label of the one that it has."""

    route: str
    directory: str
    label: str
    ask: Mapping[str, object]
    """What keeps the update from touching caches."""
    done: str
    shown_by: str
    shown: str
    sampled: str
    """The label again, in every sample."""


class Tokenizer(FrozenFacts, frozen=True, kw_only=True):
    """How the server shows what it makes of text."""

    route: str
    text: str
    ask: Mapping[str, object] = {}
    token_ids: str
    chat_route: str | None = None
    chat_text: str = ""
    """Where the rendered messages come back; they are then tokenised as text."""


class Facts(FrozenFacts, frozen=True, kw_only=True):
    """What the server shows of itself, by the names under which engines are compared."""

    routes: tuple[str, ...]
    """What they show is looked at as one document; of a name that is shown twice the last counts."""
    max_model_len: Mapping[str, int]
    """Where it is shown, and how many tokens of it the server keeps to itself; the first that is there counts."""
    longer: str
    """What to do where nothing of that is shown."""
    most_samples: str = ""
    """How many samples one call may ask for; not asked where samples are called for one by one."""
    more_samples: str = ""
    """What to do for more."""
    effective: tuple[str, ...] = ()
    """What is shown where the settings in force are; none: they are not."""
    semantic: Mapping[str, str] = {}
    numeric: Mapping[str, str] = {}
    deployment: Mapping[str, str] = {}
    known: Mapping[str, str] = {}
    """Numeric facts that hold for every such server, and that none shows."""


class Dialect(FrozenFacts, frozen=True, kw_only=True):
    """Everything that is particular to one kind of server."""

    name: str
    completions: str
    prompt: str = "prompt"
    takes_text: bool = False
    """The prompt is text, because the server takes no ids: it must become the very ids that are meant."""
    model: str | None = "model"
    salt: str | None = None
    always: Mapping[str, object]
    """Fields of every call."""
    greedy: Mapping[str, object] = {}
    """Fields in place of temperature 0, where that is refused."""
    names: Mapping[str, str]
    """Sampling parameter to the path of its field; what is in neither this nor `cannot` is called alike."""
    cannot: Mapping[str, str]
    """Sampling parameter to the reason why it is not sent when it differs from its default."""
    undone_by: Mapping[str, str] = {}
    """Sampling parameter to another that makes the server forget it."""
    samples_apart: bool = False
    """Each sample is a call of its own, with the next seed: asked for together they would share one, or cannot be."""
    least_logprobs: int = 0
    """Alternatives to ask for so that the sampled token's own logprob comes back."""
    largest_seed: int
    seed_probe: SeedProbe
    numbers: Mapping[LogprobKind, Numbers]
    """A server with one kind reports that, whatever is wished for."""
    before_truncation: bool = False
    """Processed logprobs leave out top-p and top-k: under these they are the model's own, or have no name."""
    samples: str
    """A list of samples; one that is asked for alone may come without it."""
    index: str = ""
    """Not asked where samples are called for one by one."""
    token_ids: str
    lost: str
    """Why there may be fewer logprobs than tokens."""
    output_tokens: str | None = None
    """How many tokens the server made, by its own count; None where it does not tell, or not sample by sample."""
    prompt_tokens: str | None
    """How many tokens the server saw in the prompt: all that it tells of them; None where it does not."""
    cached_tokens: str | None
    text: str | None
    finish: str
    finish_words: Mapping[str, FinishReason]
    scoring: Scoring | None = None
    updating: Updating | None = None
    reset_cache: str | None = None
    """A route that forgets every cached prefix, and refuses where it did not."""
    streaming: Streaming | None = None
    """None where nothing says that streams carry ids and logprobs."""
    tokenizer: Tokenizer | None
    facts: Facts
    hints: Mapping[Capability, str]
    """What to do where a capability is missing."""
