"""A program to be killed: `recording.py baseline|observe FILE`. It says one line for every batch on the disk.

`baseline` loads the model once and then forks a recorder for every line on its stdin, so that a test can kill many of
them without paying for the start of torch each time; the pid of each recorder is its first line.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zerodrift.core.completion import Answer, Completion, EngineFingerprint, FinishReason, LogprobKind
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

ROWS = 24
BATCH = 2


def say(*words: object) -> None:
    # No print: ours is read by a program, line by line.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def baseline(path: Path) -> None:
    from zerodrift.audit import baseline as recording
    from zerodrift.backends.reference import ReferenceBackend

    recording.BATCH = BATCH
    reference = ReferenceBackend("testbed:llama")
    prompts = [Prompt(tuple(range(4, 6 + number % 7))) for number in range(ROWS)]
    sampling = SamplingParams(seed=0, max_tokens=6)
    say("ready")
    while sys.stdin.readline():
        child = os.fork()
        if child == 0:
            say("pid", os.getpid())
            fresh = recording.record(reference, prompts, sampling, path, lambda *done: say("batch", *done))
            say("done", fresh)
            os._exit(0)
        # Reaped when told so: until then its number cannot become that of another process, and may be killed.
        sys.stdin.readline()
        os.waitpid(child, 0)
        say("ended")


class Slow:
    """An engine that takes its time; its answer is a function of the request."""

    def fingerprint(self) -> EngineFingerprint:
        return EngineFingerprint(engine="slow", semantic={}, numeric={}, deployment={})

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        time.sleep(0.02)
        return [Answer(tuple(self._completion(r, index) for index in range(r.sampling.n))) for r in requests]

    def _completion(self, request: Request, index: int) -> Completion:
        # Long enough that a batch is more than one page of the disk.
        output = tuple(range(index, index + 400))
        return Completion(
            prompt_token_ids=request.prompt.token_ids,
            token_ids=output,
            logprobs=tuple(-0.01 * token for token in output),
            kind=LogprobKind.PROCESSED,
            sampling=request.sampling,
            finish_reason=FinishReason.LENGTH,
            versions=(VersionSpan(WeightVersion("v"), 0, len(output)),),
            fingerprint=self.fingerprint().digest,
            sample_index=index,
        )


def requests() -> list[Request]:
    return [
        Request(Prompt((number,)), SamplingParams(seed=number, n=1 + number % 3, max_tokens=400))
        for number in range(ROWS)
    ]


def observe(path: Path) -> None:
    from zerodrift.audit import observe as observing

    observing.BATCH = BATCH
    rollouts = observing.observe(Slow(), requests(), "parity", path, lambda *done: say("batch", *done))
    say("done", len(rollouts))


if __name__ == "__main__":
    {"baseline": baseline, "observe": observe}[sys.argv[1]](Path(sys.argv[2]))
