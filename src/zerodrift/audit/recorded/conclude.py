"""One conclusion from all sides: who is guilty, in which words, and since when.

The rules are those of an audit; what is added is the side. Where engine and trainer show the same numbers, and these
are not the checkpoint's, a known cause may still explain them (both report raw logprobs). If none does, the checkpoint
is the odd one out of three, and the only honest answer is that it cannot be told. Nor can it where every cause is a
parameter that may have been requested, and the dump does not say.
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

import msgspec

from zerodrift.audit.decide import Circumstances, Decision, decide
from zerodrift.audit.explain import LEAST_EXPLAINED
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.recorded.reading import how_to_state
from zerodrift.audit.recorded.sides import Side, Sides
from zerodrift.core.cause import CAUSES, UNEXPLAINED, Layer
from zerodrift.records.verdict import CauseFound, Outcome, Probe

WEIGHT_SYNC = "weight sync"
DUMP = "dump"
"""Guilty where rollouts were written down wrongly, by whoever wrote them."""
NOTHING_TO_DATE = "nothing to date"
ROUGHLY = 0.1
"""Of a temperature: a thousand samples tell it to a twentieth."""
COARSE = 1e-3
"""Nats: a top-k of 50 or a min-p of 0.01 cuts off a few thousandths."""
ODD_CHECKPOINT = (
    "Engine and trainer agree with each other and not with the checkpoint: it is not the one that made these "
    "rollouts, or the dump leaves out how they were sampled."
)
PREVIOUS_IS_THEIRS = (
    "Engine and trainer agree with each other, and both have the numbers of --previous in every rollout: that is the "
    "checkpoint that made these rollouts, and --model is another. Judge them by it."
)


class Parameters(NamedTuple):
    """What is known of sampling parameters beyond the request."""

    unstated: Sequence[str] = ()
    """Those that the dump leaves open."""
    in_force: Mapping[str, float] = {}
    """Those that explain the numbers, or the samples."""
    by_numbers: bool = False
    """Numbers tell those exactly; samples tell them roughly."""
    in_trainer: Mapping[str, float] = {}
    """Those that explain the trainer's numbers."""

    @property
    def to_state(self) -> dict[str, float]:
        """Found exactly, and not stated; a temperature that the samples have is typed in two digits."""
        if self.by_samples is not None:
            return {"temperature": self.by_samples}
        return {
            name: self.in_force[name] for name in self.in_force if name in self.unstated and self.by_numbers
        }

    @property
    def by_samples(self) -> float | None:
        """A temperature that nobody stated, and that samples have where the engine's numbers have another."""
        if self.by_numbers or not {"temperature"} & set(self.unstated) & set(self.in_force):
            return None
        roughly = self.in_force["temperature"]
        exactly = self.in_trainer.get("temperature", roughly)
        return exactly if abs(exactly - roughly) <= ROUGHLY * roughly else float(f"{roughly:.2g}")

    @property
    def names(self) -> set[str]:
        """All that are in force somewhere."""
        return {*self.in_force, *self.in_trainer}

    def hidden_in(self, resolution: float) -> bool:
        """They cut distributions short, and what that does to logprobs, once renormalised, is no more than `resolution`."""
        if "top_p" in self.in_force:
            return -log(self.in_force["top_p"]) <= resolution
        return resolution >= COARSE and bool(self.in_force.keys() & {"top_k", "min_p"})


AS_STATED = Parameters()


def conclude(
    sides: Sides,
    results: Sequence[ProbeResult],
    causes: Sequence[CauseFound],
    *,
    same_numbers: bool,
    parameters: Parameters = AS_STATED,
    resolution: float = 0.0,
) -> Decision:
    """`same_numbers`: engine and trainer both left the reference, and for the same place; `resolution`: nats below which
    the engine's numbers say nothing."""
    about = Circumstances(
        unstated=parameters.unstated if _left_open(sides, parameters, resolution) else (),
        in_force=parameters.names,
        odd_reference=same_numbers and not _named(causes),
        # Tokens that were taken and not drawn are asked about by another probe.
        required=(Probe.DUMP, Probe.PARITY, sides.samples.overall.probe),
    )
    decision = decide(results, causes, about)
    if decision.unstated:
        sampled = None if "engine" in sides.guilty else parameters.by_samples
        if sampled is not None:
            return decision._replace(message=_two_temperatures(sampled, sides))
        return decision._replace(message=_state_it(decision.unstated, parameters))
    if about.odd_reference and decision.verdict is Outcome.INCONCLUSIVE:
        return decision._replace(message=ODD_CHECKPOINT)
    if decision.verdict is not Outcome.FAIL:
        return decision
    return _with_sides(decision, sides, same_numbers=same_numbers)


def of_the_previous(decision: Decision) -> Decision:
    """Engine and trainer agree, and every rollout has the numbers of the weights from before."""
    # With its fix it would read as an update that never came.
    listed = tuple(msgspec.structs.replace(cause, gating=False) for cause in decision.causes)
    return decision._replace(message=PREVIOUS_IS_THEIRS, causes=listed)


def _left_open(sides: Sides, parameters: Parameters, resolution: float) -> bool:
    """A parameter that nobody stated may be all that is wrong.

    Numbers that are right while the samples, or the trainer's, are not contradict those under any parameters, if they
    are sharp enough: a top-p of 0.95 moves them by 0.05 nats, which is no more than bf16 does. Only raw logprobs are
    right under any temperature but the requested one: until that is known, the sampler may be sound.
    """
    if "engine" in sides.guilty:
        return True
    if "sampler" not in sides.guilty:
        return False
    return parameters.by_samples is not None or parameters.hidden_in(resolution)


def _two_temperatures(sampled: float, sides: Sides) -> str:
    who = "The samples and the trainer's numbers have"
    if "trainer" not in sides.guilty:
        who = "The samples have about"
    return (
        f"{who} temperature {sampled:.4g}, the engine's numbers are those of temperature 1, and the dump does not "
        f"state which was requested: {how_to_state(['temperature'])}. After {sampled:.4g} the engine reports raw "
        "logprobs; after 1 the tokens are drawn wrongly."
    )


def _state_it(names: Sequence[str], parameters: Parameters) -> str:
    values = {name: value for name, value in parameters.in_force.items() if name in names}
    if not values:
        return (
            f"The numbers fit the checkpoint under other parameters than were assumed, and the dump does not state "
            f"{', '.join(names)}: {how_to_state(names)}, and ask again."
        )
    roughly = "" if parameters.by_numbers else "about "
    told = ", ".join(f"{name} {roughly}{value:.4g}" for name, value in values.items())
    return (
        f"With {told} the rollouts are the checkpoint's, and the dump does not state it: if that was requested, "
        f"{how_to_state(list(values))}, and ask again."
    )


def _with_sides(decision: Decision, sides: Sides, *, same_numbers: bool) -> Decision:
    """The guilty sides by name, in words that fit them."""
    names, message, principal = list(sides.guilty), decision.message, decision.principal
    known = None if principal is None else CAUSES[principal.cause]
    if known is not None and known.outranks:
        message += " Is --model the checkpoint that made these rollouts?"
    elif known is not None and known.of_record and principal and principal.found_by != Probe.TRAINER:
        # One writer wrote both sides where both have the same numbers.
        names = [DUMP, *(name for name in names if name == "trainer" and not same_numbers)]
    elif known is not None and known.layer is Layer.WEIGHTS:
        # A sampler that still has the old weights draws their tokens, whatever numbers are reported with those.
        names = [WEIGHT_SYNC if name in {"engine", "sampler"} else name for name in names]
    if (
        names == ["trainer"]
        and principal is not None
        and known is not None
        and known.layer is not Layer.TRAINER
    ):
        # The sentences of other causes speak of an engine.
        message = "The trainer's logprobs are not those of the checkpoint"
        fits_none = ", and fit none of the known causes; how they differ is in the evidence."
        message += fits_none if principal.cause == UNEXPLAINED else f"; {principal.evidence}."
    return decision._replace(guilty=" and ".join(names), message=message)


def _named(causes: Sequence[CauseFound]) -> bool:
    """A cause that explains why both could be off together: how numbers are read, never which weights made them."""
    return any(
        cause.explained >= LEAST_EXPLAINED and CAUSES[cause.cause].layer is Layer.SEMANTIC for cause in causes
    )


def side_in_words(guilty: str, sides: Sides) -> str:
    """The guilty side, and the one that speaks against it."""
    words = {
        "none": "none: what the dump shows is the checkpoint's",
        "unknown": "cannot be told",
        "engine": "engine: its logprobs leave the checkpoint's",
        "trainer": "trainer: its logprobs leave the checkpoint's and the engine's do not",
        "sampler": "sampler: the reported logprobs are right, and the tokens were not drawn from them",
        DUMP: "dump: the numbers may be right, and are written down wrongly",
        WEIGHT_SYNC: f"{WEIGHT_SYNC}: the engine's logprobs are those of the weights from before",
    }.get(guilty, f"{guilty}: each leaves the checkpoint by itself")
    if guilty in ("engine", WEIGHT_SYNC) and sides.trainer is not None:
        words += ", and the trainer's are the checkpoint's"
    if guilty == "none" and sides.trainer is None:
        words += "; of the trainer it has no logprobs"
    return words


def since_in_words(sides: Sides) -> str:
    """When each guilty side went wrong."""
    guilty = sides.guilty
    if not guilty and sides.engine.dated is None:
        return NOTHING_TO_DATE
    guilty = guilty or {"engine": sides.engine}
    told = {name: _since(side) for name, side in guilty.items()}
    return "; ".join(words if len(told) == 1 else f"{name} {words}" for name, words in told.items())


def _since(side: Side) -> str:
    if side.dated is not None:
        return side.dated.message
    return "not known" if side.since is None else side.since.message
