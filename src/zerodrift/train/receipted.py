"""What would a receipt have said of a run's updates? Its engine once more, its faults included, between the last two checkpoints.

Not taken while it trained: a receipt asks the engine as well, and what the engine draws next would no longer be the run's. Its faults are there
before the first of the two versions, as they were by then, so that what a cache kept of that one is kept.
"""

import shutil
from pathlib import Path

import msgspec

from zerodrift import models
from zerodrift.core.errors import RecordError
from zerodrift.core.version import WeightVersion
from zerodrift.models.testbed_config import EOS_ID
from zerodrift.records.codec import write_atomically
from zerodrift.sync.canary import random_canary
from zerodrift.sync.key import create_key
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.take import ReceiptTaker
from zerodrift.train.accused import save
from zerodrift.train.checkpoint import steps_of
from zerodrift.train.measured import measured_engine
from zerodrift.train.records import RunFiles, version_label

TOLD, KEY = "receipt.json", "receipt.key"
TOKENS = 640
"""Of the canary, as in docs/sync.md: enough for an update of a few steps on a built-in model."""


class Receipted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receipt in short; the whole one is in the ledger beside it."""

    arrival: str
    cause: str | None
    message: str
    steps: tuple[int, int]
    """Between the weights of which."""


def receipted(run: Path, out: Path) -> Receipted:
    """Once; `out` is made anew where nothing was told yet."""
    if (told := out / TOLD).is_file():
        return msgspec.json.decode(told.read_bytes(), type=Receipted)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config = RunFiles(run).header().config
    kept = steps_of(run)
    if len(kept) < 2 or kept[-2] < config.train.inject_from:
        raise RecordError(
            f"{run} has no two checkpoints with its faults; train on, with a lower checkpoint_every"
        )
    before, after = kept[-2:]
    places = {step: save(config, run, step, out / f"step-{step}") for step in (before, after)}
    engine = measured_engine(config)
    try:
        vocab_size = models.facts(str(places[after])).vocab_size
        canary = random_canary(vocab_size, TOKENS, avoid=range(EOS_ID + 1))
        taker = ReceiptTaker(engine, canary, ReceiptLedger(out, create_key(out / KEY)))
        engine.load_weights(places[before], WeightVersion(version_label(before)))
        taker.start(models.load(str(places[before])), version_label(before))
        engine.load_weights(places[after], WeightVersion(version_label(after)))
        engine.reset_cache()
        receipt = taker.take(models.load(str(places[after])), version_label(after))
    finally:
        engine.close()
    found = Receipted(
        arrival=str(receipt.arrival), cause=receipt.cause, message=receipt.message, steps=(before, after)
    )
    write_atomically(told, msgspec.json.encode(found))
    return found
