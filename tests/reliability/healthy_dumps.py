"""How often is a healthy dump called bad? Ten of each kind, sampled by plain transformers with SmolLM2, and judged.

    python tests/reliability/healthy_dumps.py [DUMPS [KIND…]]

A kind is a precision, a temperature and a top-p, as bf16:0.3:1. Of fp32 nothing is said: that is for the numbers to
tell. They cannot tell bf16, and without a word they are not judged (`tests/unit/audit/recorded/test_unknown_precision.py`):
it is said, as `--precision bf16` says it. Exit code 1 where a healthy dump fails.
"""

import itertools
import sys
import time
from typing import Any, NamedTuple

import torch
from plain_rollouts import prompts, rollouts
from transformers import AutoModelForCausalLM

from zerodrift.audit.blame import Blame
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.core.request import SamplingParams
from zerodrift.models.smollm2 import DEFAULT_DIRECTORY
from zerodrift.records.dump import Dump
from zerodrift.records.dump_fields import LinePlace
from zerodrift.records.dump_formats import DumpFormat, read_plain
from zerodrift.records.verdict import Outcome

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, TOKENS = 2, 32
"""Sixteen rollouts of 32 tokens in each dump: twice what a verdict needs at least."""


class Kind(NamedTuple):
    """How a healthy engine was asked."""

    precision: str
    temperature: float
    top_p: float

    @classmethod
    def of(cls, words: str) -> "Kind":
        """From `bf16:0.3:1`."""
        precision, temperature, top_p = words.split(":")
        return cls(precision, float(temperature), float(top_p))


KINDS = [
    *(Kind(precision, heat, 1.0) for precision, heat in itertools.product(DTYPES, (0.3, 0.5, 1.0, 1.5))),
    *(Kind(precision, 1.0, 0.9) for precision in DTYPES),
]


def dump_of(kind: Kind, model: Any, reference: ReferenceBackend, seed: int) -> Dump:
    """Rollouts of a healthy engine, as recorded."""
    asked = prompts(reference.tokenizer)
    rows = [
        row
        for step in range(STEPS)
        for row in rollouts(
            model,
            asked,
            seed=STEPS * seed + step,
            tokens=TOKENS,
            temperature=kind.temperature,
            top_p=kind.top_p,
            step=step,
        )
    ]
    read = [
        read_plain(row, LinePlace("healthy", line + 1, SamplingParams()))[0] for line, row in enumerate(rows)
    ]
    return Dump(format=DumpFormat.PLAIN, rollouts=tuple(read), lines=len(read))


def said(kind: Kind) -> Precision | None:
    """What a user would say of it."""
    return None if kind.precision == Precision.FP32 else Precision(kind.precision)


def say(line: str) -> None:
    """At once, because a whole run takes an hour."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Judge them all; how many fail, and why."""
    count = int(arguments[0]) if arguments else 10
    kinds = [Kind.of(words) for words in arguments[1:]] or KINDS
    reference, failed = ReferenceBackend(DEFAULT_DIRECTORY), 0
    for kind in kinds:
        began = time.process_time()
        model = AutoModelForCausalLM.from_pretrained(DEFAULT_DIRECTORY, dtype=DTYPES[kind.precision]).eval()
        verdicts = [
            Blame(dump=dump_of(kind, model, reference, seed), reference=reference, precision=said(kind))
            .run()
            .record
            for seed in range(count)
        ]
        outcomes = {outcome.value: sum(each.verdict is outcome for each in verdicts) for outcome in Outcome}
        told = [each.precision for each in verdicts]
        failed += outcomes["FAIL"]
        seconds = (time.process_time() - began) / count
        say(
            f"{kind.precision} T={kind.temperature:g} top_p={kind.top_p:g}: {outcomes}, told {told.count('fp32')} fp32, "
            f"{seconds:.0f} s of one core each"
        )
        for each in verdicts:
            if each.verdict is not Outcome.PASS:
                say(f"    {each.verdict}: {each.message}")
                say(f"    metrics {dict(each.metrics)}, gates {dict(each.gates)}")
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
