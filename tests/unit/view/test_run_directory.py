from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from zerodrift.core.errors import RecordError, SchemaMismatch
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
    (tmp_path / "verdict.json").write_bytes((runs["inconclusive"] / "verdict.json").read_bytes())
    run = read(tmp_path)
    assert (run.tokens, run.config, run.environment) == (None, None, {})


def test_rows_are_ordered_by_sequence_and_index(examples: Any, tmp_path: Path) -> None:
    drawn = examples.draw(sequences=4, length=12)
    order = np.random.default_rng(0).permutation(len(drawn.columns["token"]))
    shuffled = {
        name: [column[i] for i in order] if isinstance(column, list) else column[order]
        for name, column in drawn.columns.items()
    }
    record = examples.verdict("PASS", guilty="none", says="")
    tokens = read(examples.write(tmp_path, record, examples.Drawn(shuffled))).tokens
    assert tokens is not None
    np.testing.assert_array_equal(tokens.sequence, drawn.columns["sequence"])
    np.testing.assert_array_equal(tokens.index, drawn.columns["index"])
    np.testing.assert_array_equal(tokens.reported, drawn.columns["reported"])
    assert tokens.text.to_pylist() == drawn.columns["text"]


def test_a_table_without_rows_is_no_table(examples: Any, tmp_path: Path) -> None:
    columns = {name: column[:0] for name, column in examples.draw().columns.items()}
    record = examples.verdict("INCONCLUSIVE", guilty="unknown", says="")
    assert read(examples.write(tmp_path, record, examples.Drawn(columns))).tokens is None


def test_a_directory_without_a_verdict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no verdict.json; it is not a finished audit"):
        read(tmp_path)


def test_another_schema_is_refused_by_name(runs: dict[str, Path], tmp_path: Path) -> None:
    text = (runs["passing"] / "verdict.json").read_text(encoding="utf-8")
    (tmp_path / "verdict.json").write_text(text.replace("zerodrift.verdict/1", "zerodrift.verdict/9"))
    with pytest.raises(
        SchemaMismatch, match=r"'zerodrift.verdict/9', and this version reads 'zerodrift.verdict/1'"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"schema": "zerodrift.verdict/1"}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_verdict_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "verdict.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"verdict.json cannot be read: "):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"\xff", "config.yaml is not UTF-8 text"),
        ("environment.json", b"[]", "environment.json cannot be read"),
        ("environment.json", b"{", "environment.json cannot be read"),
        ("tokens.parquet", b"PAR1", "tokens.parquet is damaged"),
        ("tokens.parquet", b"", "tokens.parquet is damaged"),
    ],
)
def test_a_damaged_file_is_refused(
    runs: dict[str, Path], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "verdict.json").write_bytes((runs["passing"] / "verdict.json").read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read(tmp_path)


def spoil(name: str, row: int, value: float) -> Callable[[dict[str, Any]], None]:
    def change(columns: dict[str, Any]) -> None:
        columns[name][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("reported", 3, np.nan), "row 3: reported is nan, which no audit writes"),
        (spoil("reported", 0, -np.inf), "row 0: reported is -inf"),
        (spoil("contracted", 2, np.nan), "row 2: contracted is nan"),
        (spoil("contracted", 2, np.inf), "row 2: contracted is inf"),
        (spoil("sigma", 1, 0.0), "row 1: sigma is 0.0"),
        (spoil("sigma", 1, np.nan), "row 1: sigma is nan"),
    ],
)
def test_numbers_that_no_audit_writes_are_refused(
    examples: Any, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    drawn = examples.draw(sequences=2, length=12)
    change(drawn.columns)
    record = examples.verdict("PASS", guilty="none", says="")
    with pytest.raises(RecordError, match=message):
        read(examples.write(tmp_path, record, drawn))


def test_an_impossible_token_is_one_with_an_infinite_delta(runs: dict[str, Path]) -> None:
    tokens = read(runs["hostile"]).tokens
    assert tokens is not None
    assert (~tokens.possible).sum() == 1
    assert tokens.delta[~tokens.possible].tolist() == [-np.inf]


def test_columns_of_another_kind_are_refused(examples: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_bytes((runs["passing"] / "verdict.json").read_bytes())
    columns = examples.draw(sequences=2, length=12).columns
    columns["token"] = columns["token"].astype(np.float64)
    write_tokens(tmp_path / "tokens.parquet", columns)
    with pytest.raises(
        RecordError, match="column 'token' holds double with 0 gaps; it must hold whole numbers"
    ):
        read(tmp_path)
    columns["token"] = [None, *range(1, len(columns["text"]))]
    write_tokens(tmp_path / "tokens.parquet", columns)
    with pytest.raises(RecordError, match="column 'token' holds int64 with 1 gaps"):
        read(tmp_path)


def test_other_columns_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_bytes((runs["passing"] / "verdict.json").read_bytes())
    table = pa.table({"token": [1]}).replace_schema_metadata({b"schema": SCHEMA})
    pyarrow.parquet.write_table(table, tmp_path / "tokens.parquet")
    with pytest.raises(RecordError, match=r"has the columns \['token'\] in place of"):
        read(tmp_path)


def test_a_table_of_somebody_else_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_bytes(msgspec.json.encode(read(runs["passing"]).record))
    pyarrow.parquet.write_table(pa.table({"token": [1]}), tmp_path / "tokens.parquet")
    with pytest.raises(RecordError, match="was not written by this version"):
        read(tmp_path)
