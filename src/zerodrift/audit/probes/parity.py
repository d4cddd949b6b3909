"""Are the reported numbers the trainer's, and were the tokens drawn from what they claim?"""

import msgspec
import numpy as np

from zerodrift.audit.probes.result import ProbeResult
from zerodrift.drift import sampling
from zerodrift.drift.gates import Gates
from zerodrift.drift.parity import compare
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import SamplingEvidence
from zerodrift.records.verdict import Outcome, Probe


def parity(
    table: TokenTable,
    gates: Gates,
    rng: np.random.Generator,
    probe: Probe = Probe.PARITY,
    *,
    required: bool = True,
    to_have_more: str = "",
) -> ProbeResult:
    """Reported numbers against contracted ones; `to_have_more` is what asks for more tokens, where there is such a thing."""
    compared = compare(table, gates, rng)
    too_few = compared.outcome is Outcome.INCONCLUSIVE and compared.evidence is None and to_have_more
    return ProbeResult(
        probe=probe,
        status=compared.outcome,
        message=compared.message + (f" ({to_have_more})" if too_few else ""),
        evidence=compared.evidence,
        required=required,
        vacuous=compared.evidence is None,
    )


def samples(
    table: TokenTable,
    probe: Probe = Probe.SAMPLING,
    *,
    greedy: bool,
    required: bool = True,
    to_have_more: str = "",
) -> ProbeResult:
    """Sampled tokens against the distribution that was asked for, greedy ones against the likeliest.

    `to_have_more` is the option that asks for more samples, where there is one.
    """
    tested = sampling.greedy(table) if greedy else sampling.fidelity(table)
    doubtful = tested.outcome is Outcome.INCONCLUSIVE and not tested.vacuous
    return ProbeResult(
        probe=probe,
        status=tested.outcome,
        message=tested.message + (f" ({to_have_more})" if doubtful and to_have_more else ""),
        evidence=tested.evidence,
        required=required,
        vacuous=tested.vacuous,
    )


def drawn_again(doubtful: ProbeResult, more: ProbeResult) -> ProbeResult:
    """What chance does once in ten thousand runs is settled by samples of their own: a fault is there again.

    Together the two are wrong about a healthy engine as rarely as one test at the level of a verdict.
    """
    evidence = more.evidence
    if not isinstance(evidence, SamplingEvidence) or evidence.p is None or more.vacuous:
        return doubtful
    again = evidence.p < sampling.SAMPLING_ALPHA / sampling.SAMPLING_DOUBT
    first = doubtful.message.partition(sampling.UNDECIDED)[0]
    seen = f"in {evidence.tokens:,} tokens more, p = {evidence.p:.2g}"
    return msgspec.structs.replace(
        doubtful,
        status=Outcome.FAIL if again else Outcome.PASS,
        message=f"{first}; {seen}: {'it is no chance' if again else 'it was chance'}",
    )
