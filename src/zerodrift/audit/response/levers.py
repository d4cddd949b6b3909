"""Where a model can be turned a little, as data. A lever is one place with so many numbers, all 0 where nothing is turned.

Torch-free: `plumbing.py` finds the levers of a model and moves them, `knobs.py` makes of them what has a name.
"""

from enum import StrEnum
from typing import NamedTuple

from zerodrift.stats.arrays import Floats


class Effect(StrEnum):
    """What the numbers of a lever do."""

    SCORES = "scores"
    """Attention scores of each query head × (1 + t)."""
    HEAD = "head"
    """What each head gives to the output projection × (1 + t)."""
    KEYS_FP8 = "keys-fp8"
    """Keys + t · (keys in fp8 − keys): all the way at 1."""
    VALUES_FP8 = "values-fp8"
    NORM_GAIN = "norm-gain"
    """What a norm gives × (1 + t)."""
    NORM_EPS = "norm-eps"
    """eps of a norm + t."""
    NEURON = "neuron"
    """What each neuron gives to the down projection × (1 + t)."""
    SLOPE = "slope"
    """Inside the activation: f((1 + t) x) / (1 + t), which is x · σ(β x) of a swish with β = 1 + t."""
    GATE = "gate"
    """What the gate projection gives to the activation × (1 + t)."""
    RESIDUAL = "residual"
    """The residual stream that goes into a layer × (1 + t)."""
    EXPERT = "expert"
    """What each expert gives × (1 + t)."""
    ROTARY = "rotary"
    """Each band of rotary frequencies × (1 + t)."""
    QUERY_OFFSET = "query-offset"
    """What the query projection gives to each head + t, in every channel."""
    KEY_OFFSET = "key-offset"
    VALUE_OFFSET = "value-offset"
    QUERY_CHANNEL = "query-channel"
    """Each channel that the query projection gives × (1 + t), head by head."""
    KEY_CHANNEL = "key-channel"
    VALUE_CHANNEL = "value-channel"
    EMBEDDED_BIAS = "embedded-bias"
    """Each channel of the residual stream that goes into the first layer + t."""
    ATTENTION_BIAS = "attention-bias"
    """Each channel that attention adds to the residual stream + t."""
    MLP_BIAS = "mlp-bias"
    SINK = "sink"
    """The softmax of each head has one more entry, which nothing is read from: of weight t, so of score log t."""
    SCORE_CAP = "score-cap"
    """Attention scores squeezed into ± 1/√t."""
    HEAD_POSITION = "head-position"
    """Positions at which the queries of each head are turned + t."""
    OFFSET = "offset"
    """Positions of the output + t."""
    LOGIT_SCALE = "logit-scale"
    """Logits × (1 + t)."""
    SOFT_CAP = "soft-cap"
    """Logits squeezed into ± 1/√t."""
    LOGIT_ROW = "logit-row"
    """The logit of each of some tokens + t."""


class Lever(NamedTuple):
    """One place in a model."""

    kind: Effect
    layer: int | None
    """None: not in a layer, or in all."""
    place: str
    """Which of several of a kind: the name of a norm, or of a rotary table."""
    size: int
    neutral: float = 0.0
    """What the quantity is where t is 0, for kinds that need to know: eps."""
    labels: tuple[int, ...] = ()
    """What each number belongs to where it is not its index: ids of tokens."""
    of_heads: bool = False
    """A norm of queries or keys, inside attention."""
    block: int = 0
    """Channels that lie together: of one head, or all of a stream; 0 where numbers are no channels."""


Member = tuple[Lever, int]
"""One number of a lever."""
Columns = dict[Member, int]
"""Where the derivative by each number of each lever stands."""


class Jacobian(NamedTuple):
    """Derivatives of every judged token's logprob, tokens in the order of the windows."""

    columns: Columns
    matrix_NC: Floats
