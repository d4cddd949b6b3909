"""Audits as they lie on the disk, of engines that mean, compute or draw something else."""

import msgspec
import numpy as np
import pytest

from zerodrift.core.cause import CAUSES
from zerodrift.core.completion import Completion, EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.codec import LineWriter
from zerodrift.records.directory import CONFIG, ROLLOUTS, write_verdict
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord

GATE = 1e-5
NOTHING = EngineFingerprint(engine="vllm", semantic={}, numeric={}, deployment={})


def rollouts(*, stream, shift, requests=12, tokens=16):
    """Answers of an engine that draws from `stream` and reports its logprobs `shift` nats too high.

    Two of four tokens are certain, so that two streams have some in common.
    """
    for number in range(requests):
        rng = np.random.default_rng([stream, number])
        drawn = tuple(0 if index % 4 < 2 else int(rng.integers(1, 200)) for index in range(tokens))
        sampling = SamplingParams(seed=number)
        completion = Completion(
            prompt_token_ids=(number,),
            token_ids=drawn,
            logprobs=tuple(-1.0 - index / 10 + shift for index in range(tokens)),
            kind=LogprobKind.PROCESSED,
            sampling=sampling,
            finish_reason=FinishReason.LENGTH,
            versions=(VersionSpan(WeightVersion("a"), 0, tokens),),
            fingerprint="x",
        )
        yield Rollout(
            index=number, group="parity", request=Request(Prompt((number,)), sampling), completion=completion
        )


def cause(name, found_by="attribution"):
    return CauseFound(
        cause=name,
        gating=True,
        explained=1.0,
        interval=(0.9, 1.0),
        evidence="so",
        fix=CAUSES[name].fix("vllm"),
        found_by=found_by,
    )


@pytest.fixture(scope="session")
def write_audit():
    """An audit in a directory; `mean` is what it found against the reference, `causes` are as `NAME by PROBE`."""

    def write(
        directory, *, causes=(), mean=2e-6, stream=0, shift=0.0, cut_off=False, requests=12, weights="a"
    ):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text("model:\n  path: x\n")
        with LineWriter[Rollout](directory / ROLLOUTS) as writer:
            writer.write(*rollouts(stream=stream, shift=shift, requests=requests))
        parity = ProbeRecord(
            name="parity", status=Outcome.PASS, required=True, message="so it is", cut_off=cut_off
        )
        record = VerdictRecord(
            verdict=Outcome.FAIL if causes else Outcome.PASS,
            guilty="none",
            message="",
            engine=NOTHING,
            reference=msgspec.structs.replace(NOTHING, semantic={"weights": weights}),
            model="x",
            precision="fp32",
            floor={"mean": 2e-6},
            metrics={"mean": mean},
            gates={"mean": GATE},
            causes=tuple(cause(*each.split(" by ")) for each in causes),
            probes=(parity,),
        )
        write_verdict(directory, record)
        return directory

    return write
