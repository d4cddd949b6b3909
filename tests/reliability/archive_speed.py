"""What an archive costs: `archive_speed.py DIR` keeps a batch of a million tokens there for a while.

500 rollouts of 2,000 tokens with a prompt of 200; ids as words of a language are (Zipf), logprobs of the engine and of the
trainer in 32 bits. Processor time stands beside the clock's, for the machine may be busy.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans

ROLLOUTS, LENGTH, PROMPT, VOCABULARY = 500, 2000, 200, 150_000


def batch(chance: np.random.Generator) -> ArchivedBatch:
    rollouts = []
    for number in range(ROLLOUTS):
        engine = -chance.exponential(0.5, LENGTH).astype(np.float32)
        trainer = engine + chance.normal(0, 0.01, LENGTH).astype(np.float32)
        ids = np.minimum(chance.zipf(1.3, PROMPT + LENGTH), VOCABULARY - 1).tolist()
        rollouts.append(
            ArchivedRollout(
                id=f"12/{number}",
                prompt_token_ids=tuple(ids[:PROMPT]),
                token_ids=tuple(ids[PROMPT:]),
                behavior_logprobs=tuple(engine.tolist()),
                old_logprobs=tuple(trainer.tolist()),
                versions=version_spans([11] * (LENGTH // 2) + [12] * (LENGTH // 2)),
                mask=(True,) * LENGTH,
                reward=float(number % 2),
            )
        )
    return ArchivedBatch(step=12, state=BatchState.QUARANTINE, trainer_version="12", rollouts=tuple(rollouts))


def timed(name: str, action: Callable[[], object]) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    action()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    sys.stdout.write(f"{name:<8} {processor:5.2f} s of processor, {wall:5.2f} s\n")


def size(directory: Path) -> int:
    (path,) = directory.iterdir()
    return path.stat().st_size


def main(directory: Path) -> None:
    made = batch(np.random.default_rng(0))
    archive = Archive(directory)
    timed("append", lambda: archive.append(made))
    journal = size(directory / "journals")
    timed("seal", archive.close)
    segment = size(directory / "segments")
    reader = ArchiveReader(directory)
    (entry,) = reader.entries()
    timed("read", lambda: reader.read(entry))
    tokens = made.tokens
    sys.stdout.write(
        f"{tokens:,} tokens: {journal / tokens:.1f} bytes each in the journal, {segment / tokens:.1f} in the segment\n"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as below:
        main(Path(below))
