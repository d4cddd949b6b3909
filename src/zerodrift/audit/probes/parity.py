"""Are the reported numbers the trainer's, and were the tokens drawn from what they claim?"""

import numpy as np

from zerodrift.audit.probes.result import ProbeResult
from zerodrift.drift import sampling
from zerodrift.drift.gates import Gates
from zerodrift.drift.parity import compare
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.verdict import Outcome, Probe


def parity(
    table: TokenTable,
    gates: Gates,
    rng: np.random.Generator,
    probe: Probe = Probe.PARITY,
    *,
    required: bool = True,
) -> ProbeResult:
    """Reported numbers against contracted ones."""
    compared = compare(table, gates, rng)
    return ProbeResult(
        probe=probe,
        status=compared.outcome,
        message=compared.message,
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
