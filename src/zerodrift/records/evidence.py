"""What each probe measured, by name and type; `verdict.json` holds the same as a plain mapping.

A field that is None was not measured, and does not stand in the file.
"""

import math

import msgspec


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of one probe."""

    def as_record(self) -> dict[str, float | int | str | bool]:
        """As a verdict keeps it."""
        plain: dict[str, float | int | str | bool] = msgspec.to_builtins(self)
        return plain


class ContractEvidence(Evidence, frozen=True, kw_only=True):
    """Samples by what became of them."""

    completions: int
    unreadable: int
    ended: int
    """Before the limit."""


class TokenizerEvidence(Evidence, frozen=True, kw_only=True):
    """Texts, and those that become other ids."""

    texts: int
    differing: int


class TemplateEvidence(Evidence, frozen=True, kw_only=True):
    """Conversations, and those that become other ids."""

    conversations: int
    differing: int
    refused: int = 0
    """By the engine, or by its template."""


class ParityEvidence(Evidence, frozen=True, kw_only=True):
    """|Δ| in nats; the figures are None where too few tokens could be drawn at all."""

    tokens: int
    mean: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    k3: float | None = None
    signed_mean: float | None = None
    token_ess: float | None = None
    sequence_ess: float | None = None
    impossible_tokens: int
    """Sampled, and excluded by the requested parameters."""
    stable_context: int | None = None
    """Tokens of prompt and output up to which Δ stays at the floor; None where it does not depend on their number."""


class Power(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a PASS says of one kind of deviation: the smallest that would have been caught, 19 times in 20."""

    name: str
    """Of the kind, for programs."""
    message: str
    """The same for people."""
    seen_from: float | None = None
    """None where none would have been."""


class SamplingEvidence(Evidence, frozen=True, kw_only=True):
    """Tests of drawn tokens; only z and the counts where they were (nearly) certain."""

    z: float
    p: float | None = None
    p_surprise: float | None = None
    p_rank: float | None = None
    p_id: float | None = None
    p_serial: float | None = None
    p_serial_rank: float | None = None
    p_counts: float | None = None
    """Of draws by id, probability, place and end, against how often each was due."""
    tokens: int
    variance: float | None = None
    power: tuple[Power, ...] = ()
    """Stands in the verdict, beside the probes."""

    def as_record(self) -> dict[str, float | int | str | bool]:
        """Without the power, which is no figure of what was seen."""
        return {name: value for name, value in super().as_record().items() if name != "power"}


class EndsEvidence(Evidence, frozen=True, kw_only=True):
    """Single tokens, drawn where a stop token is likely."""

    prefixes: int
    draws: int
    drawn: int
    """Stop tokens."""
    due: float
    p: float
    bias: float | None = None
    """Asked for on the stop token, where no prefix makes it likely by itself."""
    power: tuple[Power, ...] = ()
    """Stands in the verdict, beside the probes."""

    def as_record(self) -> dict[str, float | int | str | bool]:
        """Without the power, which is no figure of what was seen."""
        return {name: value for name, value in super().as_record().items() if name != "power"}


class ParametersEvidence(Evidence, frozen=True, kw_only=True):
    """Sampling parameters by what became of them."""

    asked: str
    refused: str = ""
    """The engine does not take them."""
    wrong: str = ""
    """Not honoured as asked."""
    draws: int
    power: tuple[Power, ...] = ()
    """Stands in the verdict, beside the probes."""

    def as_record(self) -> dict[str, float | int | str | bool]:
        """Without the power, which is no figure of what was seen."""
        return {name: value for name, value in super().as_record().items() if name != "power"}


class GreedyEvidence(Evidence, frozen=True, kw_only=True):
    """Tokens where nothing was to be drawn."""

    tokens: int
    not_likeliest: int


class GapEvidence(Evidence, frozen=True, kw_only=True):
    """|Δ| between two scores of the same tokens."""

    tokens: int
    mean: float
    max: float


class UnseededEvidence(Evidence, frozen=True, kw_only=True):
    """Tokens that two runs with the same seeds share, of those drawn."""

    shared: int
    drawn: int


class AnewEvidence(Evidence, frozen=True, kw_only=True):
    """Samples of one prompt without a seed, in pairs."""

    pairs: int
    equal: int | None = None
    """Where they are too alike, as is `log_e`: nats against chance."""
    log_e: float | None = None


class MixedEvidence(Evidence, frozen=True, kw_only=True):
    """Requests of one call, each with parameters of its own."""

    requests: int
    off: int
    others: int
    """Of those, reported by the parameters of another request."""


class AgreementEvidence(Evidence, frozen=True, kw_only=True):
    """An engine against itself, with one thing about a request's surroundings changed."""

    tokens: int
    differing: int
    """Tokens whose logprobs differ in any bit."""
    mean: float
    max: float
    alone_is_right: bool | None = None
    """What it answers to a request by itself is the reference's."""
    prefill_is_right: bool | None = None
    """What it scores as a prompt is the reference's."""
    cached_tokens: int | None = None
    changed: int | None = None
    """Requests that got other numbers when both sides were asked once more; None where nothing called for that."""
    predicted: bool | None = None
    """The cause that is named gives every number of the difference, and not only its side."""
    decoded_only: bool | None = None
    """First tokens, whose logits a prompt's prefill computes, are the same both ways, and those after them are not."""


class ReturnEvidence(AgreementEvidence, frozen=True, kw_only=True):
    """Requests of the audit, asked again at its end; outliers are tokens whose Δ is beyond rounding."""

    outliers: int = 0
    outlier_requests: int = 0
    requests: int = 0
    """That were compared with the reference, as the outliers were."""
    asked_again: int = 0
    """Requests with an outlier that were asked again, …"""
    gone: int = 0
    """… and those of them that were answered otherwise then."""
    came: int = 0
    """Requests without an outlier that were answered otherwise."""
    rest_is_right: bool = False
    """Without its outliers, Δ is within the gates."""
    explained: float = 0.0
    """Share of |Δ| that the outliers hold."""
    another_entry: int | None = None
    """Outliers whose reported value is that of another token in the same distribution, …"""
    another_position: int | None = None
    """… of another token of the same output, …"""
    another_request: int | None = None
    """… or of another request's output; each of `looked_at`."""
    looked_at: int | None = None
    since_request: int | None = None
    """None came before this one, and that is no chance."""
    until_request: int | None = None
    prompts_from: int | None = None
    """Only prompts of so many tokens and more, …"""
    prompts_to: int | None = None
    """… or of so many and fewer."""
    outputs_from: int | None = None
    """Only tokens of an output from this one on."""
    cached_only: bool | None = None
    """Only requests that were served from the prefix cache."""

    @property
    def comes_and_goes(self) -> bool:
        """Half of what was wrong was otherwise when it was asked again; or what was right was not then.

        A fault of one request in twenty is met again by one in twenty.
        """
        return 2 * self.gone >= self.asked_again > 0 or self.came > 0


class StreamEvidence(Evidence, frozen=True, kw_only=True):
    """Streamed answers; numbers are compared where whole and streamed ones could be read."""

    tokens: int | None = None
    differing: int | None = None
    mean: float | None = None
    max: float | None = None
    requests: int
    pieces: int | None = None
    parted: int | None = None
    """Answers that have other tokens where they are streamed."""


class HeadEvidence(Evidence, frozen=True, kw_only=True):
    """Shares of the distances between likely tokens that are those of a coarse format; `share` is that of the variance."""

    bf16_on_grid: float | None = None
    fp16_on_grid: float | None = None
    on_grid: float | None = None
    mean: float | None = None
    share: float | None = None


class SyncEvidence(Evidence, frozen=True, kw_only=True):
    """A weight update: slope 1 is delivered, 0 is stale; gaps are mean |Δ|."""

    slope: float
    gap_fresh: float
    gap_cached: float
    gap_returned: float
    predicted_change: float
    cached_tokens: int


class RewardsEvidence(Evidence, frozen=True, kw_only=True):
    """Rewards of both sides on the same prompts."""

    task: str
    prompts: int
    prompts_left_out: int
    engine_rewards: int
    reference_rewards: int
    engine_mean: float | None = None
    engine_std: float | None = None
    reference_mean: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p: float | None = None
    p_mean: float | None = None
    p_distribution: float | None = None
    least_p: float | None = None
    """That these rewards could have given, however they were labelled."""


class DumpEvidence(Evidence, frozen=True, kw_only=True):
    """Lines of a dump by what became of them."""

    lines: int
    judged: int
    bad_lines: int
    empty: int
    repeated: int


class PreviousWeightsEvidence(Evidence, frozen=True, kw_only=True):
    """Rollouts by the weights that explain their numbers."""

    at_previous: int
    at_model: int
    at_neither: int


class OnsetEvidence(Evidence, frozen=True, kw_only=True):
    """Since which step; `first` is None where none stands out."""

    log_e: float
    unit: str
    first: int | None = None
    affected: int | None = None


class LocatedEvidence(Evidence, frozen=True, kw_only=True):
    """One quantity inside the model that Δ follows: `layer 2, attention head 3, output × 0.990 [0.989, 0.991], R² 1.00`."""

    layer: int | None = None
    """Counted from 0; None where it is in no layer, or in all."""
    part: str
    index: int | None = None
    """Of several of a kind: a head, a neuron, an expert, a token."""
    rows: tuple[int, int] | None = None
    """Of a tensor, the first and the one behind the last; None where it is about all of them."""
    channels: tuple[int, int] | None = None
    """Of a head or of a stream, likewise."""
    quantity: str
    estimate: float
    low: float
    high: float
    neutral: float
    """What it is in the reference."""
    r2: float
    """Share of Δ² that it predicts in sequences it was not chosen on, with all that are located together."""
    alike: str = ""
    """Others that these tokens cannot tell from it."""

    @property
    def place(self) -> str:
        """Where it is."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        index = "" if self.index is None else f" {self.index}"
        rows = "" if self.rows is None else f"rows {self.rows[0]}–{self.rows[1] - 1} of "
        channels = ""
        if self.channels is not None:
            first, last = self.channels
            channels = f", channel {first}" if last == first + 1 else f", channels {first}–{last - 1}"
        return f"{layer}{rows}{self.part}{index}{channels}"

    @property
    def done(self) -> bool:
        """Something that is done or not, and was: there is no more and no less of it."""
        measured = self.quantity in ("bias", "offset", "sink", "limit")
        return self.neutral == 0 and self.low == self.high == 1 and not measured

    @property
    def message(self) -> str:
        """In one line."""
        between = f"[{self.low:.4g}, {self.high:.4g}]"
        # Minus nothing is nothing.
        factor, low, high = (round(each, 4) + 0.0 for each in (self.estimate, self.low, self.high))
        value = {
            "fp8": "in fp8" if self.estimate == 1 else f"in fp8 by {self.estimate:.2f} {between}",
            "eps": f"eps {self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}] instead of {self.neutral:.3g}",
            "soft cap": f"soft cap {self.estimate:.4g} {between}",
            "bias": f"{self.estimate:+.4g} {between}",
            "offset": f"{self.estimate:+.4g} {between}",
            "limit": f"limited to ± {self.estimate:.4g} {between}",
            "sink": f"one more entry of weight {self.estimate:.4g} {between} in its softmax: score {_log(self.estimate):+.3g}",
        }.get(self.quantity, f"{self.quantity} × {factor:.4f} [{low:.4f}, {high:.4f}]")
        value = self.quantity if self.done and self.quantity != "fp8" else value
        same = f" (or {self.alike})" if self.alike else ""
        return f"{self.place}, {value}{same}, R² {self.r2:.2f}"


def _log(weight: float) -> float:
    """Of a weight in a softmax: its score."""
    return math.log(max(weight, 1e-30))
