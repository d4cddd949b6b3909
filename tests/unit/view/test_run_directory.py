from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from zerodrift.core.errors import RecordError
from zerodrift.records.directory import read_verdict, write_verdict
from zerodrift.records.tokens import SCHEMA, write_tokens
from zerodrift.view.run_directory import read


def test_everything_is_read(runs: dict[str, Path]) -> None:
    run = read(runs["failing"])
    assert run.name == "failing"
    assert run.record.verdict == "FAIL"
    assert run.config is not None
    assert run.config.startswith("model:")
    assert run.environment == {
        "zerodrift": "0.1.0",
        "packages.torch": "2.11.0",
        "packages.scipy": "null",
        "cores": "2",
        "devices": "[]",
    }
    assert run.tokens is not None
    np.testing.assert_array_equal(run.tokens.delta, run.tokens.contracted - run.tokens.reported)
    assert run.tokens.possible.all()


def test_all_but_the_verdict_may_be_missing(runs: dict[str, Path], tmp_path: Path) -> None:
    write_verdict(tmp_path, read_verdict(runs["inconclusive"]))
    run = read(tmp_path)
    assert (run.tokens, run.config, run.environment) == (None, None, {})


def test_rows_are_ordered_by_sequence_and_index(examples: Any, tmp_path: Path) -> None:
    columns = examples.draw(sequences=4, length=12)
    order = np.random.default_rng(0).permutation(len(columns["token"]))
    shuffled = {name: np.asarray(column)[order] for name, column in columns.items()}
    shuffled["text"] = shuffled["text"].tolist()
    tokens = read(examples.write(tmp_path, examples.verdict("PASS"), shuffled)).tokens
    assert tokens is not None
    for name in ("sequence", "index", "reported"):
        np.testing.assert_array_equal(getattr(tokens, name), columns[name])
    assert tokens.text.to_pylist() == columns["text"]


def test_a_table_without_rows_is_no_table(examples: Any, tmp_path: Path) -> None:
    columns = {name: column[:0] for name, column in examples.draw().items()}
    assert read(examples.write(tmp_path, examples.verdict("INCONCLUSIVE"), columns)).tokens is None


def test_an_impossible_token_is_one_with_an_infinite_delta(runs: dict[str, Path]) -> None:
    tokens = read(runs["hostile"]).tokens
    assert tokens is not None
    assert (~tokens.possible).sum() == 1
    assert tokens.delta[~tokens.possible].tolist() == [-np.inf]


@pytest.fixture
def finished(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A directory with a verdict, and nothing else yet. What a verdict may not be is in records/test_directory.py."""
    write_verdict(tmp_path, read_verdict(runs["passing"]))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.yaml", b"\xff"), ("environment.json", b"[]"), ("environment.json", b"{")),
        *(("tokens.parquet", b"PAR1"), ("tokens.parquet", b"")),
    ],
)
def test_a_damaged_file_is_refused(finished: Path, name: str, content: bytes) -> None:
    (finished / name).write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read(finished)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("reported", 3, np.nan),
        ("reported", 0, -np.inf),
        ("contracted", 2, np.nan),
        ("contracted", 2, np.inf),
        ("sigma", 1, 0.0),
        ("sigma", 1, np.nan),
        ("token", slice(None), 1.5),
        ("token", 0, None),
    ],
)
def test_numbers_that_no_audit_writes_are_refused(
    examples: Any, finished: Path, column: str, row: Any, value: float | None
) -> None:
    columns = examples.draw(sequences=2, length=12)
    columns[column] = columns[column].astype(object)
    columns[column][row] = value
    columns[column] = columns[column].tolist()
    write_tokens(finished / "tokens.parquet", columns)
    with pytest.raises(RecordError) as caught:
        read(finished)
    assert column in str(caught.value)


@pytest.mark.parametrize("metadata", [{b"schema": SCHEMA}, {}], ids=["other columns", "of somebody else"])
def test_another_table_is_refused(finished: Path, metadata: dict[bytes, bytes]) -> None:
    table = pa.table({"token": [1]}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, finished / "tokens.parquet")
    with pytest.raises(RecordError):
        read(finished)
