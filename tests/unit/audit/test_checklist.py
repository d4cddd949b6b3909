"""Answers of the doctor and of an audit, made up: what do they become on the checklist?"""

from itertools import product

import msgspec
import pytest

from zerodrift.audit.checklist import (
    JudgedTarget,
    audit_item,
    doctor_item,
    left_out,
    not_run,
    rewards_item,
    rewards_of,
    sync_item,
)
from zerodrift.audit.decide import Circumstances, decide
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.core.completion import EngineFingerprint
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.records.preflight import Status, worst
from zerodrift.records.rewards import Rewards
from zerodrift.records.verdict import CauseFound, Outcome, Probe, ProbeRecord, VerdictRecord

SOUND = "vllm serve Q --logprobs-mode processed_logprobs --generation-config vllm --no-enable-prefix-caching"
COUNTS = {"prompts": 32, "prompts_left_out": 0, "engine_rewards": 64, "reference_rewards": 64}
FACTS = {"task": "sums", **COUNTS, "engine_mean": 0.9, "engine_std": 0.1, "p": 0.5}
AGAIN = "zerodrift audit --config c.yaml --sync"


def of(command: str) -> Diagnosis:
    return diagnose(CommandLine(command), {})[0]


def probe(name: str, status: Outcome = Outcome.PASS, **fields: object) -> ProbeRecord:
    return ProbeRecord(
        **{"name": name, "status": status, "required": True, "message": f"{name} says", **fields}
    )


def cause(name: str, found_by: str, *, gating: bool = True, fix: str = "mend it") -> CauseFound:
    return CauseFound(
        cause=name,
        gating=gating,
        explained=1.0,
        interval=(1.0, 1.0),
        evidence="seen",
        fix=fix,
        found_by=found_by,
    )


def verdict(
    *probes: ProbeRecord, causes: tuple[CauseFound, ...] = (), missing: tuple[Probe, ...] = ()
) -> VerdictRecord:
    side = EngineFingerprint(engine="vllm", semantic={}, numeric={}, deployment={})
    results = [
        ProbeResult(probe=Probe(each.name), status=each.status, message=each.message, required=each.required)
        for each in probes
    ]
    asked_for = tuple(each.probe for each in results)
    conclusion = decide(results, causes, Circumstances(required=(*asked_for, *missing)))
    return VerdictRecord(
        verdict=conclusion.verdict,
        guilty=conclusion.guilty,
        message=conclusion.message,
        engine=side,
        reference=side,
        model="m",
        precision="fp32",
        floor={},
        metrics={"mean": 1e-7},
        gates={},
        causes=causes,
        probes=probes,
        reproduce=AGAIN,
    )


# --- doctor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status", "typed"),
    [
        (f"{SOUND} --no-async-scheduling", Status.PASS, ()),
        (SOUND, Status.WARN, ("zerodrift doctor run.yaml --fix",)),
        ("vllm serve Q", Status.FAIL, ("zerodrift doctor run.yaml --fix",)),
        (
            f"{SOUND} --no-async-scheduling --logprobs-mode $M",
            Status.INCONCLUSIVE,
            ("zerodrift doctor run.yaml",),
        ),
    ],
)
def test_the_doctors_answer(command, status, typed):
    item = doctor_item([JudgedTarget("run.yaml", of(command))])
    assert (item.status, item.type) == (status, typed)
    assert item.message.startswith("run.yaml: ")


def test_findings_are_listed_with_their_cure():
    item = doctor_item([JudgedTarget("run.yaml", of("vllm serve Q --block-size 16"))])
    assert item.details[0].startswith("wrong: logprobs mode raw_logprobs. Logprobs are taken before")
    assert item.details[0].endswith(" → --logprobs-mode processed_logprobs")
    assert item.details[-1].startswith("not judged: --block-size")
    assert "1 wrong" in item.message


def test_the_server_counts_too_and_one_that_cannot_be_asked_is_not_passed():
    sound = JudgedTarget("run.yaml", of(f"{SOUND} --no-async-scheduling"))
    item = doctor_item([sound, JudgedTarget("http://x", "cannot be judged: nobody answers")])
    assert item.status is Status.INCONCLUSIVE
    assert item.message.endswith("http://x: cannot be judged: nobody answers")
    assert item.type == ("zerodrift doctor http://x",)


# --- audit, weight-sync, rewards --------------------------------------------------------------------------------


def test_a_pass_has_the_evidence_of_parity():
    item = audit_item(verdict(probe("contract"), probe("parity")))
    assert (item.status, item.type) == (Status.PASS, ())
    assert item.message == "the same policy as the reference: parity says"
    assert item.details == ("contract, pass: contract says", "parity, pass: parity says")
    assert item.facts == {"mean": 1e-7}
    assert audit_item(verdict(probe("contract"))).message.endswith("every probe passed")


def test_a_failure_has_the_fixes_of_its_causes_each_once():
    causes = (
        cause("semantic/bos", "attribution"),
        cause("semantic/eos", "contract"),
        cause("path/rope", "attribution", gating=False, fix="listed only"),
    )
    item = audit_item(verdict(probe("parity", Outcome.FAIL), causes=causes))
    assert item.status is Status.FAIL
    assert item.message == "semantic/bos: seen"
    assert item.type == ("mend it",)


def test_a_failure_without_a_cause_is_told_by_its_probe():
    item = audit_item(verdict(probe("contract"), probe("parity", Outcome.FAIL)))
    assert (item.status, item.message, item.type) == (Status.FAIL, "parity: parity says", (AGAIN,))


def test_a_question_without_an_answer_is_not_passed():
    cache = probe("cache", Outcome.INCONCLUSIVE, required=False)
    assert audit_item(verdict(cache, probe("parity"))).status is Status.PASS
    item = audit_item(verdict(cache, probe("parity", Outcome.INCONCLUSIVE)))
    assert (item.status, item.message) == (Status.INCONCLUSIVE, "parity: parity says")
    assert item.type == (AGAIN,)


def test_what_the_verdict_waits_for_is_not_passed_though_every_probe_passed():
    told = verdict(probe("contract"), probe("parity"), missing=(Probe.SAMPLING,))
    item = audit_item(told)
    assert (item.status, item.message, item.type) == (Status.INCONCLUSIVE, told.message, (AGAIN,))


def test_a_verdict_that_blames_nobody_is_not_made_a_failure():
    told = verdict(probe("parity", Outcome.FAIL), causes=(cause("path/rope", "attribution"),))
    odd = msgspec.structs.replace(told, verdict=Outcome.INCONCLUSIVE, message="cannot be told")
    item = audit_item(odd)
    assert (item.status, item.message, item.type) == (Status.INCONCLUSIVE, "cannot be told", (AGAIN,))


def test_what_has_an_item_of_its_own_is_no_fault_of_the_audit():
    causes = (cause("weights/stale", "weight-sync", fix="push them"),)
    told = verdict(
        probe("parity"), probe("weight-sync", Outcome.FAIL), probe("rewards", evidence=FACTS), causes=causes
    )
    assert audit_item(told).status is Status.PASS
    sync = sync_item(told, "…")
    assert (sync.status, sync.message, sync.type) == (Status.FAIL, "weight-sync says", ("push them",))
    assert rewards_item(told).status is Status.PASS


def test_an_update_that_cannot_be_tried_can_be_left_out():
    told = verdict(probe("weight-sync", Outcome.INCONCLUSIVE))
    assert sync_item(told, "… --no-sync").type == ("… --no-sync",)


@pytest.mark.parametrize(
    ("status", "causes", "typed"),
    [
        (Outcome.FAIL, (cause("semantic/bos", "attribution"),), "mend it"),
        (Outcome.FAIL, (), "bisect with the probes that failed"),
        (Outcome.INCONCLUSIVE, (), "equivalence_trials"),
    ],
)
def test_rewards_are_mended_by_what_mends_the_cause(status, causes, typed):
    item = rewards_item(verdict(probe("rewards", status, evidence=FACTS), causes=causes))
    assert item.status is Status(status)
    assert typed in item.type[0]
    assert item.facts == FACTS


def test_what_the_audit_did_not_reach_says_so():
    told = verdict(probe("contract", Outcome.INCONCLUSIVE))
    for item in (sync_item(told, "…"), rewards_item(told)):
        assert (item.status, item.message) == (Status.SKIPPED, "not run: audit did not get that far")
    assert not_run("history", "rewards").message == "not run: rewards did not get that far"
    assert left_out("history", "why", "typed").type == ("typed",)


def test_the_items_together_are_as_bad_as_the_verdict():
    """No way of ending falls between the items."""
    names = ("parity", "weight-sync", "rewards")
    for ends in product(Outcome, repeat=len(names)):
        told = verdict(*(probe(name, end) for name, end in zip(names, ends, strict=True)))
        items = (audit_item(told), sync_item(told, "…"), rewards_item(told))
        assert worst(item.status for item in items) == told.verdict


def test_rewards_become_a_line_of_history():
    told = verdict(probe("rewards", evidence=FACTS))
    assert rewards_of(told, "today") == Rewards(task="sums", mean=0.9, std=0.1, n=32, when="today")
    few = {name: value for name, value in FACTS.items() if name != "engine_std"}
    assert rewards_of(verdict(probe("rewards", evidence=few)), "today") is None
    assert rewards_of(verdict(probe("parity")), "today") is None


@pytest.mark.parametrize(
    ("seen", "advice"), [({"p": 1.0, "least_p": 0.5}, "equivalence_trials"), ({}, "another task")]
)
def test_more_of_what_is_never_solved_is_not_asked_for(seen, advice):
    facts = {name: value for name, value in FACTS.items() if name != "p"} | seen
    item = rewards_item(verdict(probe("rewards", Outcome.INCONCLUSIVE, evidence=facts)))
    assert advice in item.type[0]
