"""A case survives its file, and what is none is refused."""

import pytest

from zerodrift.core.errors import RecordError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.case import Case, read_case, write_case

CASE = Case(
    requests=(
        Request(
            Prompt((5, 6), cache_salt="s"), SamplingParams(temperature=0.7, top_p=0.9, max_tokens=1, seed=3)
        ),
        Request(Prompt((7,)), SamplingParams(seed=4)),
    ),
    limit=1e-4,
)


def test_there_and_back(tmp_path):
    write_case(tmp_path / "case.json", CASE)
    assert read_case(tmp_path / "case.json") == CASE


def test_in_words():
    assert (
        CASE.message
        == "prompt of 2 tokens, 1 token answered, beside 1 other request, temperature 0.7, top_p 0.9"
    )
    alone = Case(requests=CASE.requests[1:], limit=1.0)
    assert alone.message == "prompt of 1 token, 16 tokens answered, alone"


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"{}", b"[]", b"\xff", b"[" * 100_000),
        b'{"requests": [], "limit": 1}',
        b'{"requests": [{"prompt": {"token_ids": [1]}}], "limit": 0}',
        b'{"requests": [{"prompt": {"token_ids": []}}], "limit": 1}',
        b'{"schema": "zerodrift.case/9", "requests": [{"prompt": {"token_ids": [1]}}], "limit": 1}',
    ],
)
def test_what_is_no_case_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "case.json").write_bytes(content)
    with pytest.raises(RecordError):
        read_case(tmp_path / "case.json")
