"""Scores a sitting by the rules of README.md. Reads the key and what sit.py kept; needs neither torch nor a server.

    python tests/exam/score.py --half A --out runs/exam-A                                    # the table; exit 1 below the bar
    python tests/exam/score.py --half A --out runs/exam-A --write tests/exam/results-A.json
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


PARTS = {
    # What the key calls a part: beginnings of what the auditor may call it, and the quantities where not every one is true.
    "attention": (("attention",), ("output", "missing")),
    "attention-scale": (("attention", "q norm", "k norm"), None),
    "kv": (("keys", "values", "keys and values"), None),
    "v": (("values", "attention"), None),
    "mlp": (("MLP",), None),
    "mlp.act": (("MLP", "activation"), None),
    "final-norm": (("final norm",), None),
    "post-attention-norm": (("post_attention_layernorm",), None),
    "input-norm": (("input_layernorm",), None),
    "rope": (("rotary", "positions"), None),
    "logits": (("logit", "logits"), None),
    "residual-in": (("attention", "MLP", "residual stream into it"), ("output", "scale")),
    "lm_head": (("logit", "logits"), None),
    "embedding": (("embedding",), None),
}


def judge_place(fault: Mapping[str, Any], located: Sequence[Mapping[str, Any]]) -> str:
    """Whether the first place is the true one, or says that it may be, and no other layer is blamed beside it."""
    if not located:
        return "none"
    truth = fault["located"] or {}
    first = located[0]
    alternatives = [_place(first), *filter(None, str(first.get("alike", "")).split(" or "))]
    tokens = truth.get("tokens")
    if isinstance(tokens, list):
        true = {each.get("index") for each in located} <= set(tokens) and _is_true(truth, alternatives[0])
    else:
        true = any(_is_true(truth, said) for said in alternatives)
    beside = all(each.get("layer") == first.get("layer") for each in located)
    return "true" if true and beside else "false"


def _place(place: Mapping[str, Any]) -> str:
    """`layer 1, attention head 3 output`, as the auditor writes those that it cannot tell apart."""
    layer = "" if place.get("layer") is None else f"layer {place['layer']}, "
    index = "" if place.get("index") is None else f" {place['index']}"
    return f"{layer}{place['part']}{index} {place['quantity']}"


def _is_true(truth: Mapping[str, Any], said: str) -> bool:
    part = str(truth.get("part", ""))
    known = PARTS.get(part) or PARTS.get(part.partition(".")[0].partition("-")[0])
    if known is None:
        return False
    names, quantity = known
    layer, rest = re.fullmatch(r"(?:layer (\d+), )?(.*)", said).groups()
    wanted = truth.get("layer")
    same_layer = layer == (None if wanted in (None, "all") else str(wanted))
    index = truth.get("head", truth.get("neuron"))
    same_index = index is None or f" {index} " in rest
    return same_layer and same_index and rest.startswith(names) and (quantity is None or rest.endswith(quantity))


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
    places = gating[0].get("located", []) if gating else []
    name = judge_name(fault, causes)
    asked = fault["family"] in ARITHMETIC and name == UNEXPLAINED
    return Row(
        fault["id"], fault["family"], tuple(fault["true_names"]), said, causes, tuple(map(_message, places)), name,
        judge_place(fault, places) if asked else "", outcome.get("seconds"),
    )


def _message(place: Mapping[str, Any]) -> str:
    alike = f" (or {place['alike']})" if place.get("alike") else ""
    return f"{_place(place)} {place['estimate']:.5g}{alike}, R² {place['r2']:.2f}"


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


def text(rows: Sequence[Row], total: Score) -> str:
    """A table, and the figures."""
    lines = [
        " | ".join((
            each.id, each.kind, ",".join(each.true) or "-", each.verdict, ",".join(each.causes) or "-", each.name,
            "; ".join(each.located) or "-", each.place or "-", f"{each.seconds}",
        ))
        for each in rows
    ]
    lines.append(f"{total.sat} of {total.of} sat; detected {total.detected}; names {dict(total.names)}; "
                 f"located truly {total.true_place} of {total.asked_place}; healthy {dict(total.healthy)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--half", choices=sorted(KEYS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="what sit.py wrote")
    parser.add_argument("--write", type=Path, help="results as JSON")
    parser.add_argument("--commit", default="", help="of the auditor, for --write")
    asked = parser.parse_args()
    key = read_key(EXAM / KEYS[asked.half])
    rows = collect(asked.out, key, asked.half)
    total = score(rows, len(half(key, asked.half)) - len(HEALTHY))
    sys.stdout.write(text(rows, total))
    if asked.write:
        state = {"half": asked.half, "auditor": asked.commit, "state": f"{total.sat} of {total.of} sat"}
        lines = ",\n  ".join(json.dumps(each._asdict(), ensure_ascii=False) for each in rows)
        head = json.dumps(state | {"score": total._asdict()}, ensure_ascii=False)[:-1]
        asked.write.write_text(f'{head},\n "rows": [\n  {lines}\n]}}\n')
    return int(not total.passes)


if __name__ == "__main__":
    sys.exit(main())
