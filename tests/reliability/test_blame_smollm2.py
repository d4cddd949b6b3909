"""Recorded rollouts of a trained model, by plain transformers: sound ones pass, and what strangers got wrong has its name."""

import copy
from collections.abc import Callable
from functools import partial
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zerodrift.audit.blame import Blame, Blamed
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import SamplingParams
from zerodrift.models.smollm2 import COMPLETE
from zerodrift.records.dump import Dump
from zerodrift.records.dump_fields import LinePlace
from zerodrift.records.dump_formats import DumpFormat, read_plain
from zerodrift.records.verdict import Outcome

pytestmark = [pytest.mark.long, pytest.mark.smollm2]
SMOLLM2 = Path(__file__).parents[2] / ".cache" / "smollm2"
STEPS, EACH, TOKENS = 2, 8, 24
PAD = 2
Row = dict[str, Any]
Sample = Callable[..., list[Row]]
SMALL = 0.002
"""Of each tensor's spread: one small update."""


@pytest.fixture(scope="module")
def reference() -> ReferenceBackend:
    if not (SMOLLM2 / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return ReferenceBackend(SMOLLM2)


@pytest.fixture(scope="module")
def engine(reference: ReferenceBackend) -> Any:
    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype="float32").eval()


@pytest.fixture(scope="module")
def prompts(
    script: Callable[[str], ModuleType], reference: ReferenceBackend
) -> Callable[..., list[list[int]]]:
    """Prompt ids by the tokenizer's template, with or without a system prompt."""
    return partial(script("reliability/plain_rollouts").prompts, reference.tokenizer)


@pytest.fixture(scope="module")
def sampled(script: Callable[[str], ModuleType]) -> Sample:
    """Rollouts of these prompts in every step."""
    rollouts = script("reliability/plain_rollouts").rollouts

    def sample(model: Any, asked: list[list[int]]) -> list[Row]:
        return [
            row
            for step in range(STEPS)
            for row in rollouts(model, asked, seed=step, tokens=TOKENS, step=step)
        ]

    return sample


@pytest.fixture(scope="module")
def sound(engine: Any, sampled: Sample, prompts: Callable[..., list[list[int]]]) -> list[Row]:
    return sampled(engine, prompts())


def judged(rows: list[Row], reference: ReferenceBackend, **options: Any) -> Blamed:
    read = [read_plain(row, LinePlace("d", line + 1, SamplingParams()))[0] for line, row in enumerate(rows)]
    dump = Dump(format=DumpFormat.PLAIN, rollouts=tuple(read), lines=len(read))
    return Blame(dump=dump, reference=reference, **options).run()


def in_base_ten(row: Row) -> Row:
    return {**row, "logprobs": [value / log(10) for value in row["logprobs"]]}


def negated(row: Row) -> Row:
    return {**row, "logprobs": [-value for value in row["logprobs"]]}


def padded(row: Row) -> Row:
    return {**row, "prompt_token_ids": [PAD] * 5 + row["prompt_token_ids"]}


WRONGLY: dict[str, tuple[Callable[[Row], Row], str]] = {
    "log10": (in_base_ten, "semantic/notation"),
    "negated": (negated, "semantic/notation"),
    "left-padded": (padded, "semantic/padding"),
}


def test_a_sound_dump_passes(sound: list[Row], reference: ReferenceBackend) -> None:
    record = judged(sound, reference).record
    assert (record.verdict, record.causes, record.precision) == (Outcome.PASS, (), "fp32")


@pytest.mark.parametrize("name", WRONGLY)
def test_written_wrongly(name: str, sound: list[Row], reference: ReferenceBackend) -> None:
    change, cause = WRONGLY[name]
    record = judged([change(row) for row in sound], reference).record
    assert (record.verdict, record.guilty, record.causes[0].cause) == (Outcome.FAIL, "dump", cause)


def test_the_numbers_of_the_neighbour(sound: list[Row], reference: ReferenceBackend) -> None:
    whole = [row for row in sound if len(row["token_ids"]) == TOKENS]
    rows = [{**row, "logprobs": whole[place - 1]["logprobs"]} for place, row in enumerate(whole)]
    record = judged([{**row, "step": 0} for row in rows], reference).record
    assert (record.guilty, record.causes[0].cause) == ("dump", "semantic/misbound-logprobs")


def test_another_system_prompt(
    engine: Any, reference: ReferenceBackend, sampled: Sample, prompts: Callable[..., list[list[int]]]
) -> None:
    rows = sampled(engine, prompts(system="You are a helpful assistant."))
    rows = [{**row, "prompt_token_ids": ids} for row, ids in zip(rows, prompts() * STEPS, strict=True)]
    assert judged(rows, reference).record.causes[0].cause == "semantic/template"


def test_weights_one_small_update_old(
    engine: Any,
    sound: list[Row],
    reference: ReferenceBackend,
    sampled: Sample,
    prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    older, noise = copy.deepcopy(engine), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(SMALL * parameter.std() * torch.randn(parameter.shape, generator=noise))
    older.save_pretrained(tmp_path / "older")
    reference.tokenizer.save_pretrained(tmp_path / "older")
    stale = sampled(older, prompts())[EACH:]
    blamed = judged([*sound[:EACH], *stale], reference, previous=tmp_path / "older")
    assert [cause.cause for cause in blamed.record.causes] == ["weights/stale"]
    assert (blamed.record.guilty, blamed.record.precision) == ("weight sync", "fp32")
    assert blamed.since.startswith(f"since step 1: {EACH} of {EACH} rollouts ")
