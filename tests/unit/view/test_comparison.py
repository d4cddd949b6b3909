from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import ConfigError, RecordError
from zerodrift.records.directory import read_verdict, write_verdict
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.comparison import Comparison, Part, compare_runs


@pytest.fixture
def compare(tmp_path: Path) -> Any:
    """Compares two records, with a configuration each where one is given."""

    def _compare(
        old: VerdictRecord, new: VerdictRecord, configs: tuple[str | None, str | None] = (None, None)
    ) -> Comparison:
        for name, record, config in zip(("old", "new"), (old, new), configs, strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            if config is not None:
                (tmp_path / name / "config.yaml").write_text(config)
            write_verdict(tmp_path / name, record)
        return compare_runs(tmp_path / "old", tmp_path / "new")

    return _compare


@pytest.fixture
def record(examples: Any) -> VerdictRecord:
    plain: VerdictRecord = examples.verdict(Outcome.PASS, guilty="none", message="")
    return plain


def changed(record: VerdictRecord, side: str = "engine", **parts: dict[str, str]) -> VerdictRecord:
    """`record` with facts of one side put on top of its own."""
    fingerprint: EngineFingerprint = getattr(record, side)
    merged = {part: {**getattr(fingerprint, part), **facts} for part, facts in parts.items()}
    return msgspec.structs.replace(record, **{side: msgspec.structs.replace(fingerprint, **merged)})


def without(record: VerdictRecord, part: str, name: str) -> VerdictRecord:
    kept = {key: value for key, value in getattr(record.engine, part).items() if key != name}
    return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, **{part: kept}))


def test_a_run_is_the_same_as_itself(runs: dict[str, Path]) -> None:
    same = compare_runs(runs["failing"], runs["failing"])
    assert (same.before, same.after) == ("failing", "failing")
    assert (same.facts, same.causes, same.probes) == ((), (), ())
    assert same.measured_alike
    assert not same.worse
    assert {number.name for number in same.numbers} >= {"mean |Δ|", "p90 |Δ|", "k3", "floor", "token ESS"}


def told(changes: Any) -> list[tuple[Any, ...]]:
    return [(change.name, change.before, change.after) for change in changes]


def test_numbers_causes_and_probes(runs: dict[str, Path]) -> None:
    found = compare_runs(runs["passing"], runs["failing"])
    assert found.worse
    assert not found.measured_alike
    assert (found.verdict_before, found.verdict_after) == (Outcome.PASS, Outcome.FAIL)
    assert told(found.causes) == [
        ("semantic/raw-logprobs", None, "fails"),
        ("weights/stale-prefix-cache", None, "fails"),
        ("path/head-precision", None, "listed"),
        ("path/batch-variance", "listed", None),
    ]
    assert told(found.probes) == [
        ("parity", "pass", "fail"),
        ("cache", "vacuous", "inconclusive"),
        ("weight-sync", None, "fail"),
        ("repeat", "pass", None),
        ("batch", "pass", None),
    ]
    assert ("floor", 0.0041, 0.0041) in told(found.numbers)
    (name, before, after), *_ = told(found.numbers)
    assert name == "mean |Δ|"
    assert after > 5 * before


def test_a_number_that_one_run_lacks_is_none_and_one_that_both_lack_is_left_out(
    runs: dict[str, Path],
) -> None:
    found = compare_runs(runs["failing"], runs["inconclusive"])
    assert all(number.after is None for number in found.numbers)
    assert all(number.before is not None for number in found.numbers)
    assert compare_runs(runs["inconclusive"], runs["inconclusive"]).numbers == ()


def test_which_verdict_is_worse(runs: dict[str, Path]) -> None:
    order = ["passing", "inconclusive", "failing"]
    for (before, one), (after, other) in product(enumerate(order), repeat=2):
        assert compare_runs(runs[one], runs[other]).worse is (after > before)


def test_facts_come_by_part_with_added_and_removed_ones_last(compare: Any, record: VerdictRecord) -> None:
    new = without(record, "numeric", "torch")
    semantic = {"a_new_setting": "1", "logprobs_mode": "processed_logprobs"}
    new = changed(new, semantic=semantic, numeric={"dtype": "float32"}, deployment={"max_num_seqs": "64"})
    new = changed(new, "reference", numeric={"dtype": "float64"})
    new = msgspec.structs.replace(new, engine=msgspec.structs.replace(new.engine, engine="sglang"))
    facts = compare(record, new).facts
    assert [(fact.part, fact.side, *told([fact])[0]) for fact in facts] == [
        ("semantic", "engine", "logprobs_mode", "raw_logprobs", "processed_logprobs"),
        ("semantic", "engine", "a_new_setting", None, "1"),
        ("numeric", "engine", "engine", "vllm", "sglang"),
        ("numeric", "engine", "dtype", "bfloat16", "float32"),
        ("numeric", "reference", "dtype", "float32", "float64"),
        ("numeric", "engine", "torch", "2.11.0", None),
        ("deployment", "engine", "max_num_seqs", "128", "64"),
    ]


def test_the_same_weights_in_another_directory_have_only_moved(compare: Any, record: VerdictRecord) -> None:
    """A built-in model lies in the run directory, so that its path differs between any two runs."""
    old = changed(record, semantic={"model": "runs/a/model", "tokenizer": "runs/a/model"})
    new = changed(record, semantic={"model": "runs/b/model", "tokenizer": "runs/b/model"})
    facts = compare(old, msgspec.structs.replace(new, model="./model")).facts
    places = [("audit", "model"), ("engine", "model"), ("engine", "tokenizer")]
    assert [(fact.side, fact.name) for fact in facts] == places
    assert {fact.part for fact in facts} == {Part.DEPLOYMENT}
    elsewhere = (changed(record, semantic={"tokenizer": name}) for name in ("one", "another"))
    assert [fact.part for fact in compare(*elsewhere).facts] == [Part.SEMANTIC]


@pytest.mark.parametrize("weights", ["other", None])
def test_without_equal_weights_another_model_is_another_meaning(
    compare: Any, record: VerdictRecord, weights: str | None
) -> None:
    old, new = record, changed(record, semantic={"model": "b"})
    if weights is None:
        bare = msgspec.structs.replace(record.reference, semantic={})
        old, new = (msgspec.structs.replace(each, reference=bare) for each in (record, new))
    else:
        new = changed(new, "reference", semantic={"weights": weights})
    facts = compare(old, new).facts
    assert {fact.part for fact in facts} == {Part.SEMANTIC}
    assert ("engine", "model") in {(fact.side, fact.name) for fact in facts}


def test_what_was_asked_is_compared_and_what_the_engine_was_asked_to_be_is_not(
    compare: Any, record: VerdictRecord
) -> None:
    new = msgspec.structs.replace(record, precision="fp32")
    configs = (
        "engine: {url: a}\nsampling_defaults: {temperature: 0.7}\nvalidation: {gates: {k3: null}, seed: 1}\n",
        "engine: {url: b}\nsampling_defaults: {temperature: 1.0}\nvalidation: {gates: {k3: 0.1}, seed: 1}\n",
    )
    facts = compare(record, new, configs).facts
    assert told(facts) == [
        ("sampling_defaults.temperature", "0.7", "1.0"),
        ("validation.gates.k3", "null", "0.1"),
        ("precision", "bf16", "fp32"),
    ]
    assert {fact.part for fact in facts} == {Part.QUESTIONS}


def test_what_no_configuration_holds_is_asked_too(
    compare: Any, record: VerdictRecord, tmp_path: Path
) -> None:
    asked = {"planted": "", "sync": False, "weights": "a"}
    compare(record, record, ("validation: {seed: 1}\n", "validation: {seed: 1}\n"))
    (tmp_path / "old" / "asked.json").write_bytes(msgspec.json.encode(asked))
    assert compare(record, record).facts == (), "an older run did not keep it"
    changed = asked | {"planted": "semantic/bos", "sync": True, "weights": "b"}
    (tmp_path / "new" / "asked.json").write_bytes(msgspec.json.encode(changed))
    facts = compare(record, record).facts
    assert told(facts) == [("planted", "", "semantic/bos"), ("sync", "false", "true")]
    assert {fact.part for fact in facts} == {Part.QUESTIONS}
    (tmp_path / "old" / "config.yaml").unlink()
    assert told(compare(record, record).facts) == [("config.yaml", None, "present")]


def test_damaged_files_and_unfinished_runs_are_refused(
    compare: Any, record: VerdictRecord, runs: dict[str, Path], tmp_path: Path
) -> None:
    assert compare(record, record, ("- 1\n", "just text\n")).facts == (), "no mapping asks nothing"
    with pytest.raises(ConfigError):
        compare(record, record, ("a: [", "b: 1"))
    compare(record, record, ("a: 1", "a: 1"))
    (tmp_path / "new" / "config.yaml").write_bytes(b"\xff")
    with pytest.raises(RecordError):
        compare_runs(tmp_path / "old", tmp_path / "new")
    with pytest.raises(RecordError):
        compare_runs(runs["passing"], tmp_path)


def test_a_comparison_can_be_written_as_json(compare: Any, runs: dict[str, Path]) -> None:
    found = compare(*(read_verdict(runs[name]) for name in ("passing", "hostile")))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found
