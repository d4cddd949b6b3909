"""Would an audit have caught it? Public bugs, re-enacted on tiny models and audited. Makes docs/would-have-caught.md.

    make history                                                    # all of it, and the page
    python tests/faults/would_have_caught.py --bugs trl#5312 --out some.jsonl

Resumable: rows that the file holds are not run again. The page is a function of docs/would-have-caught.jsonl and of
what `history` says of each bug.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from history import BUGS, ELSEWHERE
from history.bug import UNEXPLAINED, Asked, Bug

from zerodrift import models
from zerodrift.audit.blame import Blame
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.prompts import generated
from zerodrift.audit.run import Audit
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.dump import DumpReader
from zerodrift.records.verdict import VerdictRecord

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "would-have-caught.jsonl", ROOT / "docs" / "would-have-caught.md"
LONGEST_PROMPT = 200
SIZES = {
    trials * max_tokens: ValidationConfig(
        num_prompts=prompts, equivalence_trials=trials, max_tokens=max_tokens
    )
    for prompts, trials, max_tokens in (
        # Fewer prompts than trials: one that draws twice shows whether its samples share their noise.
        (3, 4, 16),
        (6, 8, 16),
        (12, 16, 16),
        (16, 32, 16),
        (24, 32, 32),
        (32, 64, 32),
        (32, 128, 32),
    )
}
"""By the tokens that are sampled at most."""
USUAL = 1024
"""What the page is about: half of what an audit samples if nobody says otherwise."""
SEEDS = (1, 2, 3)

# Causes that the data of one audit cannot tell apart, as in docs/attribution.md.
EQUIVALENT = (
    frozenset({"weights/stale", "weights/version-label"}),
    frozenset({"path/body-precision", "weights/dtype"}),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One audit of one bug."""

    bug: str
    model: str
    tokens: int
    """Sampled, at most."""
    seed: int
    verdict: str
    guilty: str
    found: tuple[str, ...]
    """Gating causes, principal first."""
    says: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Only a verdict of FAIL stops a run."""
        return self.verdict == "FAIL"


Rows = Sequence[Row]


def look(bug: Bug, spec: str, size: ValidationConfig, scratch: Path) -> VerdictRecord:
    """The verdict on the bug by an audit of this size; `scratch` is its own."""
    place = bug.checkpoint(spec, scratch / "model") if bug.checkpoint else spec
    if bug.asked is Asked.SYNC and place == spec:
        place = models.materialise(spec, scratch / "model")
    reference = ReferenceBackend(place)
    prompts = _prompts(bug, reference, size)
    sampling = SamplingParams(temperature=bug.temperature, max_tokens=size.max_tokens)
    if bug.asked is Asked.DUMP:
        requests = parity_requests(prompts, sampling, size.equivalence_trials, size.seed)
        singles = [single for request in requests for single in _singles(request)]
        return _blamed(bug, spec, singles, scratch)
    healthy = ReferenceBackend(place, dtype="float32")
    by_trainer = bug.asked is Asked.TRAINER
    audit = Audit(
        engine=healthy if by_trainer else bug.plant(healthy),
        reference=reference,
        trainer=bug.plant(models.load(place)) if by_trainer else None,
        prompts=prompts,
        sampling=sampling,
        validation=size,
        precision=Precision.FP32,
        directory=scratch / "run",
        checkpoint=Path(place) if bug.asked is Asked.SYNC else None,
        resets_cache=bug.resets_cache,
    )
    (scratch / "run").mkdir()
    return audit.run().record


def _prompts(bug: Bug, reference: ReferenceBackend, size: ValidationConfig) -> list[Prompt]:
    if bug.prompts is not None:
        return bug.prompts(reference.tokenizer, size.num_prompts, size.seed)
    return generated(
        reference.tokenizer, reference.facts.vocab_size, LONGEST_PROMPT, size.num_prompts, size.seed
    )


def _singles(request: Request) -> list[Request]:
    """A dump has a line for each sample."""
    sampling = request.sampling
    assert sampling.seed is not None, "the plan gives every request a seed"
    return [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(sampling, n=1, seed=sampling.seed + number)
        )
        for number in range(sampling.n)
    ]


def _blamed(bug: Bug, spec: str, requests: Sequence[Request], scratch: Path) -> VerdictRecord:
    recorded = bug.plant(spec, requests, scratch)
    dump = scratch / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in recorded.rows))
    blame = Blame(
        dump=DumpReader().read(dump),
        reference=ReferenceBackend(recorded.checkpoint),
        precision=Precision.FP32,
        previous=recorded.previous,
    )
    return blame.run().record


def run_one(reported: str, spec: str, tokens: int = USUAL, seed: int = 0) -> Row:
    """One audit, in a scratch directory of its own."""
    (bug,) = [each for each in BUGS if each.reported == reported]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        record = look(bug, spec, msgspec.structs.replace(SIZES[tokens], seed=seed), Path(scratch))
    return Row(
        bug=reported,
        model=spec,
        tokens=tokens,
        seed=seed,
        verdict=record.verdict.value,
        guilty=record.guilty,
        found=tuple(cause.cause for cause in record.causes if cause.gating),
        says=record.causes[0].evidence if record.causes else record.message,
        seconds=round(time.monotonic() - began, 2),
    )


def next_step(bug: Bug, rows: Rows) -> tuple[int, int] | None:
    """Size and seed to try next in search of the smallest size at which every seed fails; None where it is known."""
    known = {(row.tokens, row.seed): row.caught for row in rows if row.model == bug.models[0]}
    for tokens in SIZES:
        caught = [known.get((tokens, seed)) for seed in SEEDS]
        if False in caught:
            continue
        return (tokens, SEEDS[caught.index(None)]) if None in caught else None
    return None


def fewest(bug: Bug, rows: Rows) -> int | None:
    """The smallest size at which every seed fails; None where none was found."""
    failed = {(row.tokens, row.seed) for row in rows if row.caught and row.model == bug.models[0]}
    return next((tokens for tokens in SIZES if all((tokens, seed) in failed for seed in SEEDS)), None)


def named(bug: Bug, row: Row) -> str:
    """`right`, `unexplained` or `wrong`: what the principal cause is, against those that are true of the bug."""
    first = (row.found or ("",))[0]
    if first in bug.causes or any(first in group and group & bug.causes for group in EQUIVALENT):
        return "right"
    return first if first == "unexplained" else "wrong"


HEAD = """# Would it have been caught?

Public bugs of RL frameworks and engines, each re-enacted in a few lines on a built-in model (`tests/faults/history`)
and put before an audit of {usual:,} sampled tokens in fp32, without a GPU. Which causes would be true names was written
down before the first run. Written by `make history`; every audit is a row of
[would-have-caught.jsonl](would-have-caught.jsonl).

**{caught} of {total} are caught.** Of these the principal cause is a true name for {right}; {apt} of those are rightly
called `unexplained`, since no cause in the vocabulary is true of them. {unexplained} are called `unexplained` and have a
name, and {wrong} got a wrong one. A bug with two models counts by the worse of them.

*Tokens* is the fewest sampled tokens with which three audits of three fail, each with prompts and seeds of its own;
the name is that of the larger audit. Below 200 tokens Δ is not judged, and an audit fails by its other questions alone,
under their names. Beside these tokens it samples for comparing the engine with itself, and for a weight update: 16 for
each of 6 or 8 prompts, several times over. What only an update shows needs no others.

| bug | what happened | seen by | caught | cause | tokens |
|---|---|---|---|---|---|
"""


def page(rows: Rows) -> str:
    """The document for these results."""
    by_bug = {
        bug.reported: [row for row in rows if row.bug == bug.reported and row.model in bug.models]
        for bug in BUGS
    }
    usual = {name: [row for row in of if (row.tokens, row.seed) == (USUAL, 0)] for name, of in by_bug.items()}
    ran = [bug for bug in BUGS if usual[bug.reported]]
    caught = [bug for bug in ran if all(row.caught for row in usual[bug.reported])]
    called = {bug.reported: _worst(bug, usual[bug.reported]) for bug in caught}
    kinds = list(called.values())
    head = HEAD.format(
        usual=USUAL,
        caught=len(caught),
        total=len(ran),
        apt=sum(called[bug.reported] == "right" and bug.causes == UNEXPLAINED for bug in caught),
        **{kind: kinds.count(kind) for kind in ("right", "unexplained", "wrong")},
    )
    lines = [_line(bug, usual[bug.reported], by_bug[bug.reported]) for bug in ran]
    unnamed = [bug for bug in caught if called[bug.reported] != "right"]
    return head + "".join(lines) + _unnamed(unnamed) + _misses(ran, caught, usual)


def _worst(bug: Bug, rows: Rows) -> str:
    kinds = {named(bug, row) for row in rows}
    return next(kind for kind in ("wrong", "unexplained", "right") if kind in kinds)


def _line(bug: Bug, rows: Rows, every: Rows) -> str:
    count = sum(row.caught for row in rows)
    caught = "yes" if count == len(rows) else f"{count} of {len(rows)} models" if count else "no"
    tokens = fewest(bug, every)
    cells = (
        f"[{bug.reported}]({bug.url})",
        bug.happened,
        f"`{bug.asked}`",
        caught,
        _causes(bug, [row for row in rows if row.caught]),
        "" if tokens is None else f"{tokens:,}",
    )
    return f"| {' | '.join(cells)} |\n"


def _causes(bug: Bug, rows: Rows) -> str:
    """Each name that was given, with what it is where it is not right."""
    given = dict.fromkeys((row.found[0], named(bug, row)) for row in rows if row.found)
    return "; ".join(
        f"`{cause}`" + ("" if kind == "right" else " (wrong)" if kind == "wrong" else " (has a name)")
        for cause, kind in given
    )


def _unnamed(bugs: Sequence[Bug]) -> str:
    """True names that were not given, and what the auditor lacks for giving them."""
    text = "\n## Caught, and not by its name\n\n"
    for bug in bugs:
        causes = " or ".join(f"`{cause}`" for cause in sorted(bug.causes))
        text += f"- {bug.reported} is {causes}: {bug.unnamed}.\n"
    return text


def _misses(ran: Sequence[Bug], caught: Sequence[Bug], usual: dict[str, list[Row]]) -> str:
    missed = [bug for bug in ran if bug not in caught]
    text = "\n## Not caught\n\n"
    text += "".join(f"- {bug.reported}: {_reason(bug, usual[bug.reported])}.\n" for bug in missed)
    text += "\n## Not run\n\nListed so that nobody takes an audit for what it is not.\n\n"
    return text + "".join(map(_not_run, ELSEWHERE))


def _reason(bug: Bug, rows: Rows) -> str:
    if bug.unseen:
        return bug.unseen
    return "; ".join(f"{row.verdict} on {row.model}: {row.says}" for row in rows if not row.caught)


def _not_run(bug: Bug) -> str:
    return f"- [{bug.reported}]({bug.url}): {bug.happened[0].lower()}{bug.happened[1:-1]}; {bug.unseen}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bugs", nargs="*", default=[bug.reported for bug in BUGS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if bug.reported in options.bugs]
    rows = list(read_lines(options.out, Row)) if options.out.exists() else []
    spawn = multiprocessing.get_context("spawn")  # torch does not survive a fork
    with (
        LineWriter[Row](options.out) as writer,
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
    ):
        while todo := _todo(bugs, rows):
            for future in as_completed([pool.submit(run_one, *step) for step in todo]):
                rows.append(future.result())
                writer.write(rows[-1])
                _tell(rows[-1])
    if options.out == RESULTS:
        PAGE.write_text(page(rows))
    return 0


def _todo(bugs: Sequence[Bug], rows: Rows) -> list[tuple[str, str, int, int]]:
    """Audits that can run side by side: the usual ones first, then the next step of each search."""
    done = {(row.bug, row.model, row.tokens, row.seed): row for row in rows}
    usual = [(bug.reported, spec, USUAL, 0) for bug in bugs for spec in bug.models]
    if left := [step for step in usual if step not in done]:
        return left
    steps = []
    for bug in bugs:
        first = done[bug.reported, bug.models[0], USUAL, 0]
        step = next_step(bug, [row for row in rows if row.bug == bug.reported]) if first.caught else None
        if step is not None:
            steps.append((bug.reported, bug.models[0], *step))
    return steps


def _tell(row: Row) -> None:
    (bug,) = [each for each in BUGS if each.reported == row.bug]
    kind = named(bug, row) if row.caught else "-"
    sys.stdout.write(
        f"{kind:11} {row.seconds:5.1f}s {row.model:14} {row.bug:16} {row.tokens:4} {row.seed} {row.verdict:12} "
        f"{row.guilty:8} {row.found} | {row.says[:150]}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
