"""The doctor on a real vLLM: its flags, its defaults, and what it shows of itself."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zerodrift import models
from zerodrift.backends.http import HttpClient
from zerodrift.backends.launch import LaunchedServer
from zerodrift.backends.vllm_launch import launch_vllm
from zerodrift.doctor.behaviour import Behaviour
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.server import Server
from zerodrift.doctor.setting import Origin, unknown
from zerodrift.doctor.tables import vllm_names, vllm_options
from zerodrift.view.diagnosis import print_diagnosis

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / os.environ.get("ZERODRIFT_TEST_ENGINE", "vllm-0.32.0") / "bin" / "python"
PARSER = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([[a.option_strings, a.nargs, a.default if isinstance(a.default, (str, int, float)) else None,
                   None if a.choices is None else [str(choice) for choice in a.choices]] for a in actions]))
"""
TAKES = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
make_arg_parser(parser)
def takes(words):
    try:
        parser.parse_args(words)
    except SystemExit:
        return False
    return True
print(json.dumps([takes(words) for words in json.loads(sys.argv[1])]))
"""
STARTS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
def starts(words):
    try:
        EngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
    except Exception as error:
        return str(error)
print(json.dumps([starts(words) for words in json.loads(sys.argv[1])]))
"""
# Every kind of flag that is judged: switches, choices, numbers, and their short forms.
WORDS = (
    *("--logprobs-mode raw", "--logprobs-mode PROCESSED_LOGPROBS", "--logprobs-m raw_logits"),
    *("--enable-prefix-caching=False", "--no-enable-prefix", "--enforce", "--enable", "--conf x.yaml"),
    *("--headless=1", "--max-logprobs nan", "--max-logprobs -1", "--max-logprobs 8k"),
    *("--max-model-len 1.5K", "--max-model-len 1.5k", "--max-model-len AUTO"),
    *("--max-num-batched-tokens auto", "--kv-offloading-size x", "--kv-offloading-size None"),
    *("--kv-offloading-size nan", "--seed 1e3", "--seed 1_0", "--seed=", "--spec-method NGRAM"),
    *("--spec-method None", "--dtype None", "--lgprobs-mode x", "--no-logprobs-mode", "--ENFORCE-EAGER"),
    *("--tp 2", "-tp 2", "-tp=2", "-tp2", "-t 2", "-qfp8", "-e", "-O 3", "-Odecode"),
    *("--hf-over.head_dtype float32", "--config=missing.yaml", "extra"),
)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parents[1].name} is not installed: engines/install {PYTHON.parents[1].name}")


@pytest.fixture(scope="module")
def flags() -> list[list[object]]:
    found: list[list[object]] = asked(PARSER)
    return found


def asked(script: str, *arguments: str) -> list[Any]:
    """What the engine's own Python prints, as JSON."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    env.pop("PYTHONPATH", None)
    run = subprocess.run(
        [PYTHON, "-c", script, *arguments], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    found: list[Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_the_table_of_flags_is_vllms_own(flags: list[list[object]]) -> None:
    options = vllm_options()
    by_arity = {
        **dict.fromkeys((*options.switches, *options.bare), 0),
        **dict.fromkeys(options.values),
        **dict.fromkeys(options.lists, "+"),
    }
    real = {}
    for strings, arity, *_ in flags:
        assert isinstance(strings, list)
        long = [word[2:] for word in strings if word.startswith("--")]
        if long and long[0] != "help":
            real[long[0]] = "+" if arity == "?" else arity
    assert by_arity == real


def test_choices_are_vllms_own(flags: list[list[object]]) -> None:
    judged = {flag for spec in vllm_names().values() for flag in (spec.flag, *spec.also)}
    real = {
        strings[0][2:]: choices
        for strings, *_, choices in flags
        if isinstance(strings, list) and strings and choices
    }
    assert {name: list(words) for name, words in vllm_options().choices.items()} == {
        name: choices for name, choices in real.items() if name in judged
    }


def test_words_are_taken_and_refused_as_vllm_does() -> None:
    real = asked(TAKES, json.dumps([["Q", *words.split()] for words in WORDS]))
    ours = [CommandLine(f"vllm serve Q {words}").read().settings["refused"].value is None for words in WORDS]
    assert dict(zip(WORDS, ours, strict=True)) == dict(zip(WORDS, real, strict=True))


def test_a_number_out_of_range_stops_vllm(tmp_path: Path) -> None:
    """Each just outside of what our table says, and all that the doctor passes just inside of what people type."""
    models.materialise("testbed:qwen3", tmp_path / "model")
    outside = []
    for name, bounds in vllm_options().bounds.items():
        least = [] if bounds.ge is None else [bounds.ge - 1]
        most = [] if bounds.le is None else [bounds.le + 1]
        ends = [each for each in (bounds.gt, bounds.lt, bounds.never) if each is not None]
        outside += [[f"--{name}={value:g}"] for value in (*least, *most, *ends)]
    inside = [["--max-model-len=-1"], ["--max-num-seqs=1"], ["--gpu-memory-utilization=1.0"]]
    told = asked(
        STARTS, json.dumps([["--model", str(tmp_path / "model"), *words] for words in outside + inside])
    )
    stopped = dict(zip(map(" ".join, outside), told, strict=False))
    assert {words for words, why in stopped.items() if why is None} == set()
    assert told[len(outside) :] == [None] * len(inside)


def test_defaults_are_vllms_own(flags: list[list[object]]) -> None:
    real = {
        strings[0][2:]: default for strings, _, default, _ in flags if isinstance(strings, list) and strings
    }
    for name, spec in vllm_names().items():
        # Those that vLLM fills in later (None there), that hold JSON, or that we name by what they mean.
        if spec.flag and spec.key is None and real.get(spec.flag) is not None and name != "lora":
            assert spec.default == real[spec.flag], name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedServer]:
    root = tmp_path_factory.mktemp("doctor")
    model = models.materialise("testbed:qwen3", root / "qwen3")
    args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    with launch_vllm(PYTHON, model, args, {}, root / "vllm.log") as launched:
        yield launched


def test_a_server_as_it_comes(server: LaunchedServer) -> None:
    diagnosis, judgements = diagnose(Server(server.url), {})
    print_diagnosis(diagnosis, Console(width=110), everything=True)  # docs/doctor.md shows it
    settings = {judgement.setting.name: judgement.setting for judgement in judgements}
    assert diagnosis.exit_code == 1
    assert {"raw-logprobs", "stale-prefixes", "split-kv-on-cpu"} <= {
        finding.rule for finding in diagnosis.findings
    }
    assert settings["logprobs_mode"].value == "raw_logprobs"
    assert settings["device"].value == "cpu"
    assert settings["async_scheduling"].value is False
    assert settings["dtype"].value == "float32"
    assert settings["max_model_len"].value == 512
    # Dev mode shows all that has a place in it; return_tokens_as_token_ids has none and is not asked about.
    unseen = {name for name, setting in settings.items() if setting.origin is Origin.UNKNOWN}
    assert unseen <= {"generation_defaults", "host"}


def test_the_mode_is_seen_without_being_shown(server: LaunchedServer) -> None:
    http = HttpClient(server.url, concurrency=1)
    try:
        models_served = http.get("/v1/models")
        assert isinstance(models_served, dict)
        measured = Behaviour(http, models_served["data"][0]["id"]).settings(
            {"logprobs_mode": unknown("logprobs_mode")}
        )
    finally:
        http.close()
    assert measured["logprobs_mode"].value == "raw_logprobs"
    assert "generation_defaults" not in measured  # raw logprobs would look alike
