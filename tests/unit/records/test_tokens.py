import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerodrift.core.errors import MissingExtra, RecordError
from zerodrift.records.tokens import COLUMNS, read_tokens, write_tokens


@pytest.fixture
def columns():
    numbers = {name: np.array([0.5, -1.5, np.nan]) for name in COLUMNS}
    return {**numbers, "token": np.array([1, 2, 3]), "text": ["a", "é", ""]}


def test_a_table_is_read_back(tmp_path, columns):
    path = tmp_path / "tokens.parquet"
    write_tokens(path, columns)
    table = read_tokens(path)
    assert table.column_names == list(COLUMNS)
    assert table["text"].to_pylist() == ["a", "é", ""]
    assert table["token"].to_pylist() == [1, 2, 3]
    assert np.array_equal(table["sigma"].to_numpy(), columns["sigma"], equal_nan=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens.parquet"]


@pytest.mark.parametrize("change", [{"colour": [1, 2, 3]}, {"sigma": None}, {"text": ["a"]}])
def test_other_columns_are_refused(tmp_path, columns, change):
    changed = {name: values for name, values in {**columns, **change}.items() if values is not None}
    with pytest.raises(RecordError):
        write_tokens(tmp_path / "tokens.parquet", changed)
    assert not list(tmp_path.iterdir())


def test_a_table_of_somebody_else(tmp_path):
    path = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(RecordError, match=r"zerodrift.tokens.*/1"):
        read_tokens(path)


@pytest.mark.parametrize("content", [None, b"", b"PAR1", b"PAR1" * 100, b"text\n", "torn"])
def test_no_table_or_a_damaged_one(tmp_path, columns, content):
    path = tmp_path / "tokens.parquet"
    if content == "torn":
        write_tokens(path, columns)
        path.write_bytes(path.read_bytes()[:-20])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(RecordError):
        read_tokens(path)


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"'zerodrift\[local\]'"):
        read_tokens(tmp_path / "tokens.parquet")
