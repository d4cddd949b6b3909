"""Scores a sitting by the rules of README.md. Reads the key and what sit.py kept; needs neither torch nor a server.

    python tests/exam/score.py --half A --out runs/exam-A                                    # the table; exit 1 below the bar
    python tests/exam/score.py --half A --out runs/exam-A --write tests/exam/results-A.json
    python tests/exam/score.py --half A --again tests/exam/results-A.json                    # kept rows by the rules of now
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import places
import yaml

EXAM = Path(__file__).parent
FIRST_HALF = 45
UNEXPLAINED = "unexplained"
ARITHMETIC = ("arithmetic-small", "arithmetic-gross")
EQUIVALENT = (
    frozenset({"weights/stale", "weights/version-label"}),
    frozenset({"semantic/temperature", "semantic/raw-logprobs"}),
    frozenset({"path/body-precision", "weights/dtype"}),
)
"""Names that the data of one audit cannot tell apart: those of tests/faults/matrix.py, no more."""


class Sitting(NamedTuple):
    """One server to audit."""

    name: str
    fault: str | None
    kind: str
    model: str
    sync: bool
    forked: bool
    """Forked from a process that has vLLM imported; or a process of its own."""


class Row(NamedTuple):
    """What came of one."""

    id: str
    kind: str
    true: tuple[str, ...]
    verdict: str
    causes: tuple[str, ...]
    located: tuple[str, ...]
    name: str
    """right, equivalent, arguable, unexplained, false, or none where nothing failed."""
    place: str
    """true, false or none; empty where no place was asked for."""
    seconds: float | None
    fields: tuple[Mapping[str, Any], ...] = ()
    """What is located as verdict.json has it, so that it can be marked again."""


HEALTHY = tuple(
    Sitting(f"healthy-{label}", None, "healthy", f"model-{model}", sync, forked)
    for label, model, sync, forked in (
        ("qwen3", "qwen3", False, False),
        ("llama", "llama", False, False),
        ("qwen3-sync", "qwen3", True, False),
        ("llama-forked", "llama", False, True),
    )
)


KEYS = {"A": "key.yaml", "B": "key.yaml", "C": "key-c.yaml", "D": "key-c.yaml"}
"""Two exams of two halves each."""


def read_key(path: Path) -> list[dict[str, Any]]:
    faults: list[dict[str, Any]] = yaml.safe_load(path.read_text())["faults"]
    return faults


def split(ids: Iterable[str]) -> dict[str, list[str]]:
    """Both halves, by order of sha256: nobody chose what is in which."""
    ordered = sorted(ids, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    first, second = ordered[:FIRST_HALF], ordered[FIRST_HALF:]
    return {"A": first, "B": second, "C": first, "D": second}


def half(key: Sequence[Mapping[str, Any]], which: str) -> list[Sitting]:
    """Healthy controls first, then the faults in the order of their hashes."""
    faults = {fault["id"]: fault for fault in key}
    chosen = [faults[name] for name in split(faults)[which]]
    return [*HEALTHY, *map(_sitting, chosen)]


def _sitting(fault: Mapping[str, Any]) -> Sitting:
    """Its server is started in the way in which the key shows that it acts."""
    forked = str(fault["acts"]["how"]).startswith("forked")
    return Sitting(fault["id"], fault["id"], fault["family"], f"model-{fault['model']}", fault["family"] == "updates", forked)


def judge_name(fault: Mapping[str, Any], causes: Sequence[str]) -> str:
    """By the first cause alone: it is what a user acts upon."""
    if not causes:
        return "none"
    first, true = causes[0], fault["true_names"]
    if first == UNEXPLAINED:
        return UNEXPLAINED
    if first in true:
        return "right"
    if any({first, name} <= group for name in true for group in EQUIVALENT):
        return "equivalent"
    return "arguable" if first in fault.get("arguable", ()) else "false"


def judge_place(fault: Mapping[str, Any], located: Sequence[Mapping[str, Any]]) -> str:
    """True, false or none, of the places in a verdict."""
    return places.judge(fault["located"] or {}, [places.said(each) for each in located])


def row(fault: Mapping[str, Any], outcome: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> Row:
    """One line of the results; without a verdict the exit code says what it was."""
    if verdict is None:
        said = {3: "INCONCLUSIVE", None: "NO ANSWER"}.get(outcome.get("exit"), f"EXIT {outcome.get('exit')}")
        said = "NEVER STARTED" if outcome["server"] == "never started" else said
        found: list[Mapping[str, Any]] = []
    else:
        said, found = verdict["verdict"].upper(), verdict["causes"]
    gating = [cause for cause in found if cause["gating"]]
    causes = tuple(cause["cause"] for cause in gating)
    located = gating[0].get("located", []) if gating else []
    name = judge_name(fault, causes)
    asked = fault["family"] in ARITHMETIC and name == UNEXPLAINED
    return Row(
        fault["id"], fault["family"], tuple(fault["true_names"]), said, causes, tuple(map(_message, located)), name,
        judge_place(fault, located) if asked else "", outcome.get("seconds"), tuple(located),
    )


def again(kept: Sequence[Mapping[str, Any]], key: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of a results-*.json by the rules of now: places from their fields, or from the text where that is all there is."""
    faults = {fault["id"]: fault for fault in key}
    rows = []
    for each in kept:
        old = Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()})
        if old.place:
            fault = faults[old.id]
            said = [places.said(one) for one in old.fields] or [places.said_in_text(one) for one in old.located]
            old = old._replace(place=places.judge(fault["located"] or {}, said))
        rows.append(old)
    return rows


def _message(place: Mapping[str, Any]) -> str:
    alike = f" (or {place['alike']})" if place.get("alike") else ""
    return f"{places.words(place)} {place['estimate']:.5g}{alike}, R² {place['r2']:.2f}"


class Score(NamedTuple):
    """Counts over the faults that were sat, healthy controls apart."""

    sat: int
    of: int
    detected: int
    names: Mapping[str, int]
    asked_place: int
    true_place: int
    healthy: Mapping[str, str]

    @property
    def passes(self) -> bool:
        """The bars: all sat, 90 % detected, no false name, 60 % of unexplained arithmetic located truly, healthy passes."""
        return (
            self.sat == self.of
            and self.detected >= 0.9 * self.sat
            and not self.names.get("false", 0)
            and self.true_place >= 0.6 * self.asked_place
            and len(self.healthy) == len(HEALTHY)
            and set(self.healthy.values()) == {"PASS"}
        )


def score(rows: Sequence[Row], of: int) -> Score:
    faults = [each for each in rows if each.kind != "healthy"]
    failed = [each for each in faults if each.verdict == "FAIL"]
    asked = [each for each in failed if each.place]
    names: dict[str, int] = {}
    for each in failed:
        names[each.name] = names.get(each.name, 0) + 1
    return Score(
        sat=len(faults), of=of, detected=len(failed), names=names, asked_place=len(asked),
        true_place=sum(each.place == "true" for each in asked),
        healthy={each.id: each.verdict for each in rows if each.kind == "healthy"},
    )


def collect(out: Path, key: Sequence[Mapping[str, Any]], which: str) -> list[Row]:
    """Rows of what was sat, in order."""
    faults = {fault["id"]: fault for fault in key}
    rows = []
    for sitting in half(key, which):
        folder = out / sitting.name
        if not (folder / "outcome.json").exists():
            continue
        healthy = {"id": sitting.name, "family": "healthy", "true_names": [], "located": None}
        fault = healthy if sitting.fault is None else faults[sitting.fault]
        verdict = folder / "run" / "verdict.json"
        said = json.loads(verdict.read_text()) if verdict.exists() else None
        rows.append(row(fault, json.loads((folder / "outcome.json").read_text()), said))
    return rows


def state(rows: Sequence[Row], key: Sequence[Mapping[str, Any]], which: str) -> str:
    """How much was sat, and whether it is a part that nobody chose."""
    ordered = [each.name for each in half(key, which) if each.fault]
    sat = [each.id for each in rows if each.kind != "healthy"]
    if not sat or set(sat) == set(ordered):
        return f"{'all' if sat else 'none'} of {len(ordered)} sat"
    first = "the first by hash" if set(sat) == set(ordered[: len(sat)]) else "NOT the first by hash"
    return f"{len(sat)} of {len(ordered)} sat, {first}"


def text(rows: Sequence[Row], total: Score) -> str:
    """A table, and the figures."""
    lines = [
        " | ".join((
            each.id, each.kind, ",".join(each.true) or "-", each.verdict, ",".join(each.causes) or "-", each.name,
            "; ".join(each.located) or "-", each.place or "-", f"{each.seconds}",
        ))
        for each in rows
    ]
    said = [places.said(one) for each in rows if each.place for one in each.fields]
    lines += [f"not in the table of places.py, so counted as false: {words}" for words in places.unread(said)]
    lines.append(f"{total.sat} of {total.of} sat; detected {total.detected}; names {dict(total.names)}; "
                 f"located truly {total.true_place} of {total.asked_place}; healthy {dict(total.healthy)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=sorted(KEYS), required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out", type=Path, help="what sit.py wrote")
    source.add_argument("--again", type=Path, help="results as JSON, to be marked by the rules of now")
    parser.add_argument("--write", type=Path, help="results as JSON")
    parser.add_argument("--commit", default="", help="of the auditor, for --write")
    asked = parser.parse_args()
    key = read_key(EXAM / KEYS[asked.half])
    if asked.again:
        kept = json.loads(asked.again.read_text())
        if kept["half"] != asked.half:
            parser.error(f"{asked.again} is of half {kept['half']}")
        rows, asked.commit = again(kept["rows"], key), asked.commit or kept["auditor"]
    else:
        rows = collect(asked.out, key, asked.half)
    total, how_much = score(rows, len(half(key, asked.half)) - len(HEALTHY)), state(rows, key, asked.half)
    sys.stdout.write(f"{text(rows, total)}{how_much}\n")
    if asked.write:
        head = {"half": asked.half, "auditor": asked.commit, "state": how_much, "score": total._asdict()}
        lines = ",\n  ".join(json.dumps(each._asdict(), ensure_ascii=False) for each in rows)
        asked.write.write_text(f'{json.dumps(head, ensure_ascii=False)[:-1]},\n "rows": [\n  {lines}\n]}}\n')
    return int(not total.passes)


if __name__ == "__main__":
    sys.exit(main())
