"""Heads, masks and chunks on a second family, and the neighbours that must not take their names.

Every injector is audited on Qwen3 in test_every_injector.py; here it is Llama, and Mistral for what needs a window.
"""

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.chunked_prefill import ChunkingReference
from zerodrift.faults.registry import FAULTS
from zerodrift.records.verdict import Outcome

NEW = {"path/kv-heads", "path/mask", "path/chunked-prefill", "path/window"}
SECOND = {
    "path/kv-heads:modulo": "testbed:llama",
    "path/kv-heads:first-only": "testbed:mistral",
    "path/mask:one-ahead": "testbed:llama",
    "path/mask:whole-prompt": "testbed:gemma3",
    "path/mask:across-sequences": "testbed:llama",
    "path/window:uncalled-for": "testbed:llama",
    "path/window:five-short": "testbed:mistral",
    "path/chunked-prefill:position-lost": "testbed:llama",
    "path/chunked-prefill:position-repeated": "testbed:mistral",
    "path/chunked-prefill:first-position": "testbed:llama",
    "path/chunked-prefill:offset": "testbed:llama",
}
NEIGHBOURS = (
    "path/rope:positions-stretched",
    "path/context-boundary:page-64",
    "path/prefix-cache:misaligned",
    "path/body-precision:bf16",
    "path/batch-variance:split-head",
)


@pytest.mark.long
@pytest.mark.parametrize("name", SECOND)
def test_it_is_named_on_a_second_family(matrix, tmp_path, name):
    row = matrix.run_faults([FAULTS[name]], SECOND[name], tmp_path)
    assert matrix.named(row), row


@pytest.mark.long
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbour_keeps_its_own_name(matrix, tmp_path, name):
    row = matrix.run_faults([FAULTS[name]], "testbed:llama", tmp_path)
    assert matrix.named(row), row
    assert not NEW & {*row.found, *row.listed}


def test_chunks_that_are_sound_pass(matrix, tmp_path):
    engine = ChunkingReference(ReferenceBackend("testbed:llama", dtype="float32"))
    record = matrix.judge(engine, ReferenceBackend("testbed:llama"), tmp_path)
    assert record.verdict is Outcome.PASS, (record.message, record.causes)
    assert not NEW & {cause.cause for cause in record.causes}
