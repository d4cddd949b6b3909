"""Findings that are another's, each beside one that differs in what makes it so."""

from typing import Any

import msgspec
import pytest

from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.audit.set_apart import cache_apart, company_apart, later_apart
from zerodrift.records.evidence import AgreementEvidence, ReturnEvidence
from zerodrift.records.verdict import FoundBy, Outcome, Probe

NOISE = "path/nondeterminism"


def differs(probe: Probe, name: str, **more: Any) -> ProbeResult:
    evidence = AgreementEvidence(tokens=48, differing=45, mean=0.01, max=0.05)
    cause = found(name, "vllm", probe, "differs", gating=True)
    return answered(
        probe, Outcome.FAIL, "differs", msgspec.structs.replace(evidence, **more), causes=(cause,)
    )


def returned(largest: float, **more: Any) -> ProbeResult:
    evidence = ReturnEvidence(tokens=96, differing=9, mean=0.001, max=largest, came=4, **more)
    cause = found(NOISE, "vllm", Probe.RETURN, "came", gating=True)
    return answered(Probe.RETURN, Outcome.FAIL, "came", evidence, causes=(cause,))


PROVEN = {"alone_is_right": True, "changed": 0}
BATCH = differs(Probe.BATCH, "path/batch-variance", **PROVEN)


@pytest.mark.parametrize(
    ("beside", "largest", "stands"),
    [
        ([BATCH], 0.05, False),
        # In a server nobody meets the same company twice.
        ([differs(Probe.BATCH, "path/batch-variance", alone_is_right=True, changed=3)], 0.05, False),
        ([BATCH], 0.5, True),
        ([BATCH, differs(Probe.REPEAT, NOISE)], 0.05, True),
        ([differs(Probe.BATCH, NOISE, **PROVEN)], 0.05, True),
        ([differs(Probe.BATCH, "path/batch-variance", alone_is_right=False, changed=0)], 0.05, True),
        ([differs(Probe.BATCH, "path/batch-variance", alone_is_right=True)], 0.05, True),
        ([differs(Probe.BATCH, "path/batch-variance", mean=1e-6, **PROVEN)], 0.05, True),
        ([], 0.05, True),
    ],
)
def test_what_company_does_does_not_come_and_go(beside, largest, stands):
    *others, judged = company_apart([*beside, returned(largest)], gate=1e-3)
    assert others == beside
    assert [cause.cause for cause in judged.causes] == [NOISE] * stands
    assert judged.status is (Outcome.FAIL if stands else Outcome.PASS)


CACHE = differs(Probe.CACHE, "path/prefix-cache", changed=0)


@pytest.mark.parametrize(
    ("beside", "particulars", "stands"),
    [
        ([CACHE], {"cached_only": True}, False),
        ([CACHE], {"prompts_from": 272}, False),
        ([CACHE], {}, True),
        ([CACHE], {"prompts_to": 272}, True),
        ([CACHE, differs(Probe.REPEAT, NOISE)], {"cached_only": True}, True),
        ([CACHE, BATCH], {"cached_only": True}, True),
        ([differs(Probe.CACHE, "path/prefix-cache", changed=3)], {"cached_only": True}, True),
        ([differs(Probe.CACHE, NOISE, changed=0)], {"cached_only": True}, True),
        ([], {"cached_only": True}, True),
    ],
)
def test_what_only_hits_of_the_cache_show_is_the_caches(beside, particulars, stands):
    *others, judged = cache_apart([*beside, returned(0.05, **particulars)])
    assert others == beside
    assert [cause.cause for cause in judged.causes] == [NOISE] * stands
    assert judged.status is (Outcome.FAIL if stands else Outcome.PASS)


@pytest.mark.parametrize(
    ("beside", "name", "gating", "stands"),
    [
        ([], "path/prefix-cache", True, False),
        ([], "path/prefix-cache", False, True),
        ([], "path/rope", True, True),
        ([differs(Probe.REPEAT, NOISE)], "path/prefix-cache", True, True),
    ],
)
def test_what_was_served_of_another_prompt_comes_and_goes_with_the_cache(
    beside: list[ProbeResult], name: str, gating: bool, stands: bool
) -> None:
    explained = found(name, "vllm", FoundBy.VALUE, "another prompt's", gating=gating)
    *_, judged = cache_apart([*beside, returned(0.05)], [explained])
    assert [cause.cause for cause in judged.causes] == [NOISE] * stands


@pytest.mark.parametrize("probe", [Probe.PARAMETERS, Probe.ENDS, Probe.PREFILL_DECODE, Probe.CACHE])
@pytest.mark.parametrize(("began", "right"), [(True, True), (True, False), (False, True)])
def test_what_began_since_is_not_what_was_asked_for_meanwhile(probe, began, right):
    asked = differs(probe, "semantic/temperature")
    judged, *_ = later_apart([asked, *([returned(0.05)] * began)], parity_is_right=right)
    # The cache is asked in pairs: what began since is on both sides.
    apart = began and right and probe is not Probe.CACHE
    assert [cause.gating for cause in judged.causes] == [not apart]
    assert judged.status is (Outcome.PASS if apart else Outcome.FAIL)
