"""What does blame say of a run's rollouts? Those of a checkpoint that the run has kept, scored by vanilla transformers.

A comparison sees that trainings differ; which side is wrong, and why, is asked of the rollouts, which need no engine any more.
Left in OUT: `rollouts.jsonl` and `model/`, so that `zerodrift blame` can be asked the same by hand, and blame's own files.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from zerodrift import models
from zerodrift.audit.blame import Blame
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import RecordError
from zerodrift.core.request import SHAPING
from zerodrift.models.quiet import quiet
from zerodrift.models.spec import builtin_name
from zerodrift.records.codec import write_atomically
from zerodrift.records.dump import DumpReader
from zerodrift.records.verdict import Outcome
from zerodrift.train.checkpoint import read_checkpoint, steps_of
from zerodrift.train.learner import Learner
from zerodrift.train.records import GroupRecord, RunFiles, version_number, versions_of
from zerodrift.train.rollouts import COARSE

MODEL, ROLLOUTS, VERDICT, TOLD = "model", "rollouts.jsonl", "blame", "told.json"
MOST = 200
"""Rollouts that are scored: a fault of every token shows in dozens, and a built-in model scores these in a second."""


class Accused(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blame's verdict on the rollouts of one version of one run."""

    outcome: Outcome
    side: str
    causes: tuple[str, ...]
    """That gate, the first first; empty where nothing is wrong, or nothing has a name."""
    evidence: str
    """Of the first."""
    fix: str
    """To type or to do, in general words; empty where nothing is wrong."""
    version: int
    rollouts: int
    directory: str


def accused(run: Path, out: Path, since: int) -> Accused:
    """Ask about rollouts of the first checkpoint from `since` on, or of the last one that has any; once about each.

    `out` is made anew where another version was asked about.
    """
    files = RunFiles(run)
    config = files.header().config
    version, groups = _of_a_checkpoint(files, run, since)
    if (told := out / TOLD).is_file():
        before = msgspec.json.decode(told.read_bytes(), type=Accused)
        if before.version == version:
            return before
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    save(config, run, version, out / MODEL)
    lines = [line for group in groups for line in _lines(group)][:MOST]
    (out / ROLLOUTS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    model = str(out / MODEL)
    facts = models.facts(model)
    reading = DumpReader(vocab_size=facts.vocab_size, context_length=facts.context_length)
    reference = ReferenceBackend(model)
    precision = _precision(config)
    asked = "" if precision is None else f" --precision {precision}"
    blamed = Blame(
        dump=reading.read(out / ROLLOUTS),
        reference=reference,
        precision=precision,
        reproduce=f"zerodrift blame {out / ROLLOUTS} --model {model}{asked}",
    ).run()
    blamed.write(out / VERDICT, reference.tokenizer.decode)
    gating = [cause for cause in blamed.record.causes if cause.gating]
    first = next(iter(blamed.record.to_fix), None)
    found = Accused(
        outcome=blamed.record.verdict,
        side=blamed.side,
        causes=tuple(cause.cause for cause in gating),
        evidence=gating[0].evidence if gating else blamed.record.message,
        fix="" if first is None else first.fix,
        version=version,
        rollouts=len(lines),
        directory=str(out),
    )
    write_atomically(out / TOLD, msgspec.json.encode(found))
    return found


def _precision(config: RunConfig) -> Precision | None:
    """As configured, where the engine is in this process; of a server it is told from the numbers."""
    if not config.train.rollouts.in_process:
        return None
    return Precision.BF16 if config.model.dtype in COARSE else Precision.FP32


def _of_a_checkpoint(files: RunFiles, run: Path, since: int) -> tuple[int, list[GroupRecord]]:
    """Whole groups of one version, whose weights are still there."""
    kept = set(steps_of(run))
    found: dict[int, list[GroupRecord]] = {}
    for group in files.groups().values():
        versions = {version_number(each) for output in group.outputs for each in versions_of(output)}
        if len(versions) == 1 and (version := versions.pop()) in kept:
            found.setdefault(version, []).append(group)
    if not found:
        raise RecordError(
            f"{run} has no rollouts of a checkpoint that it kept; nothing can be asked about them"
        )
    version = min((each for each in found if each >= since), default=max(found))
    return version, found[version]


def _lines(group: GroupRecord) -> Iterator[dict[str, Any]]:
    for output in group.outputs:
        yield {
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": output.token_ids,
            "logprobs": output.logprobs,
            "step": group.asked_at,
            "version": str(group.asked_at),
            "sampling": {name: getattr(output.sampling, name) for name in SHAPING},
            "finish_reason": output.finish_reason,
        }


def save(config: RunConfig, run: Path, step: int, directory: Path) -> Path:
    """A checkpoint of a run as a Hugging Face directory, which is returned."""
    path = config.model.path or ""
    model = models.load(path, dtype="float32" if config.model.dtype == "auto" else config.model.dtype)
    read_checkpoint(run, Learner(model, config.train), step)
    if builtin_name(path) is not None:
        models.materialise(path, directory)
    with quiet():
        model.save_pretrained(directory)
        models.tokenizer(path).save_pretrained(directory)
    return directory
