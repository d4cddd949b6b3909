"""Whatever is typed ends in 0, 1, 2 or 3: options × odd values × odd files, and never an internal error.

A case is drawn by its seed. What would take minutes (an audit, a measurement) ends as soon as it is reached: the way
there, which reads every option and every file, is the real one.
"""

import json
import math
import random
import signal
import socketserver
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.core import TyperGroup
from typer.main import get_command

from zerodrift.audit import baseline, blame, session
from zerodrift.bisect import drive, environments
from zerodrift.cli import bench
from zerodrift.cli.main import COMMANDS, app, main, make_app
from zerodrift.monitor.monitor import Monitor
from zerodrift.records.archive.journal import encode
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans
from zerodrift.sync.judge import Arrival
from zerodrift.sync.key import create_key, read_key
from zerodrift.sync.ledger import LOG as LEDGER_LOG
from zerodrift.sync.ledger import ReceiptLedger
from zerodrift.sync.receipt import Receipt
from zerodrift.weights.files import write_update
from zerodrift.weights.folder import KEPT
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.registry import LOG as REGISTRY_LOG
from zerodrift.weights.registry import Kind, Registry
from zerodrift.weights.update import UpdateManifest

FINE = frozenset({0, 1, 2, 3})
CASES, LONG = 200, 2000
PER_CHUNK = 20
LONGEST_S = 60
NOT_HERE = ("demo", "serve", "train")
"""Verbs that run for minutes or until they are stopped; the last two have tests of bad input of their own."""
SOUND = 0.6
"""Of the cases begin with a command that works, so that an odd option is met behind everything that is refused sooner."""
BATCH = "c3258ac0"
"""The batch of the archive below, whose name is a digest."""
BASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("audit",): ("testbed:llama", "--engine", "reference"),
    ("audit", "ls"): (".",),
    ("audit", "diff"): ("runs", "runs"),
    ("preflight",): ("own.yaml",),
    ("blame",): ("dump.jsonl", "--model", "testbed:llama"),
    ("doctor",): ("vllm serve Q",),
    ("baseline", "record"): ("testbed:llama", "--out", "base.jsonl"),
    ("archive", "ls"): ("archive",),
    ("archive", "show"): ("archive", BATCH),
    ("archive", "verify"): ("archive",),
    ("archive", "gradient"): ("archive", BATCH, "--model", "testbed:llama"),
    ("sync", "key"): ("another.key",),
    ("sync", "status"): ("versions",),
    ("sync", "verify"): ("receipts", "--key", "receipt.key"),
    ("sync", "rollback"): ("versions", "--expected", "step 1"),
    ("view",): ("watched", "--port", "0"),
    ("bench",): ("testbed:llama",),
    ("bisect",): ("--release", "0.32.0", "--flags", "", "--flags", "--seed 1"),
    ("init",): (),
    ("env",): (),
}
WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "0",
        "-1",
        "1",
        "3",
        "0.7",
        "nan",
        "inf",
        "-inf",
        "1e309",
        "9" * 40,
        "1:2",
        "2:1",
        ":",
        "null",
    ),
    *(
        "true",
        "cpu",
        "cuda",
        "exact",
        "reference",
        "vllm",
        "sglang",
        "llama-cpp",
        "list",
        "sums",
        "float32",
        "bf16",
    ),
    *(
        "testbed:llama",
        "testbed:none",
        "testbed:",
        "semantic/bos",
        "semantic/none",
        "trainer/autocast",
        "path/window",
    ),
    *(
        "transformers",
        "transformers:dtype=x",
        "os:getcwd",
        "no_such:thing",
        "json:",
        ":",
        "2m",
        "0s",
        "1y",
        "verl",
    ),
    *(
        "engine.name=exact",
        "engine.name=[",
        "validation.seed=x",
        "validation={}",
        "model.path=",
        "a.b.c=1",
        "=",
        "engine=1",
    ),
    *(
        "validation.num_prompts=0",
        "validation.gates.k3=-1",
        "sampling_defaults.temperature=nan",
        "engine.url=ftp://x",
    ),
    *(
        "http://127.0.0.1:9",
        "http://",
        "https://[",
        "http://a b",
        "ftp://x",
        "file:///etc/passwd",
        "\x00",
        "\x1b[2J",
        "ü🙂",
    ),
    *(
        "vllm serve Q",
        "vllm serve 'Q",
        "vllm serve Q --dtype",
        "vllm serve Q --seed=x --hf-overrides {",
        "$ vllm serve Q",
    ),
    *(
        "vllm serve . --config none.yaml",
        "docker run x",
        "vllm serve \ud800",
        "x" * 5000,
        "../..",
        "~",
        "/",
        "/dev/null",
        ".",
    ),
)
FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "nested.json": b"[" * 100_000,
    "list.json": b"[1, 2, 3]",
    "null.json": b"null",
    "wrong.json": b'{"schema": "zerodrift.verdict/2", "verdict": "MAYBE"}',
    "broken.yaml": b"a: [",
    "list.yaml": b"- 1\n- 2\n",
    "text.yaml": b"just text",
    "cyclic.yaml": b"a: &a {b: *a}\n",
    "tagged.yaml": b"!!python/object/apply:os.system ['true']\n",
    "wide.yaml": b"model: {path: 1}\nengine: {name: [exact]}\n",
    "own.yaml": b"model: {path: testbed:llama}\n",
    "nulls.yaml": b"model: null\nengine: null\nvalidation: null\nsampling_defaults: null\n",
    "trl.yaml": b"use_vllm: true\ntop_p: {a: 1}\ngeneration_kwargs: '{'\ntemperature: [1]\n",
    "serve.yaml": b"enable_prefix_caching: false\nseed: {a: b}\nhf-overrides: [1]\n1: 2\n",
    "launch.sh": b"#!/bin/sh\nvllm serve Q --seed 1\n",
    "dump.jsonl": b'{"prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-1.0, -2.0], "step": 1}\n',
    "strange.jsonl": b'{"prompt_token_ids": [-5], "token_ids": ["a"], "logprobs": [1e400]}\n{\n\xff\n',
    "prompts.jsonl": b'{"prompt": "hi"}\n{"prompt_token_ids": [5]}\n',
    "packed.gz": b"\x1f\x8b\x08\x00truncated",
    "config.json": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 0}',
}
DIRECTORIES: dict[str, dict[str, bytes]] = {
    "nothing": {},
    "model": {"config.json": FILES["config.json"]},
    "sizes": {
        "config.json": json.dumps(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 4}
            | {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 1}
        ).encode(),
        "model.safetensors": b"\xff" * 64,
        "tokenizer.json": b"{}",
    },
    "t5": {"config.json": b'{"model_type": "t5", "is_encoder_decoder": true, "architectures": ["T5"]}'},
    "runs": {"verdict.json": FILES["wrong.json"], "config.yaml": FILES["broken.yaml"]},
    "other": {"notes.txt": b"not a run"},
    "torn-archive": {"index.sqlite": b"SQLite format 3\x00" + b"\xff" * 200},
    "torn-versions": {REGISTRY_LOG: b'{"kind": "published"}\n{', LEDGER_LOG: b"\xff\n"},
    "torn-watched": {"steps.jsonl": b'{"step": 1}\nnull\n{', "settings.json": b"[]"},
}


def sound_places(path: Path) -> None:
    """What later verbs read: a training that was watched and archived, versions of weights, and their receipts."""
    rollout = ArchivedRollout(
        id="3/a",
        prompt_token_ids=(5, 6),
        token_ids=(7, 8, 9),
        behavior_logprobs=(-0.5, math.nan, -0.25),
        old_logprobs=(-0.75, -1.0, -0.5),
        versions=version_spans([11, 11, 12]),
    )
    with Archive(path / "archive", ArchiveSettings(healthy_one_in=1)) as archive:
        archive.append(batch := ArchivedBatch(step=3, state=BatchState.OK, rollouts=(rollout,)))
    assert encode(batch).digest.startswith(BATCH)
    monitor = Monitor(directory=path / "watched")
    monitor.log_step(0, kl_estimate=6e-4)
    monitor.close()
    registry = Registry(path / "versions")
    for number, follows in enumerate((None, "step 0")):
        state = {"a": torch.full((3,), float(number))}
        update = UpdateManifest(version=f"step {number}", weights=manifest_of(state))
        write_update(path / "versions" / KEPT, update.identity, update, state)
        registry.append(Kind.COMMITTED, update.weight_version, update.identity)
        registry.append(Kind.PUBLISHED, update.weight_version, update.identity, follows=follows)
    registry.close()
    create_key(path / "receipt.key")
    ReceiptLedger(path / "receipts", read_key(path / "receipt.key")).append(
        Receipt(
            version=update.weight_version,
            engine="vllm",
            replica="0",
            canary="c" * 64,
            tokens=512,
            sequences=32,
            arrival=Arrival.CONFIRMED,
            cause=None,
            message="slope 1.000",
            predicted=1e-3,
            error=1e-2,
            usual=1e-2,
            false_alarm=1e-4,
            at=0.0,
            seconds=1.0,
        )
    )


class OddPlace:
    """A directory full of odd files, and cases drawn from it."""

    def __init__(self, path: Path) -> None:
        for name, content in FILES.items():
            (path / name).write_bytes(content)
        for folder, files in DIRECTORIES.items():
            (path / folder).mkdir()
            for name, content in files.items():
                (path / folder / name).write_bytes(content)
        sound_places(path)
        (path / "loop").symlink_to("loop")
        self.values = [
            *WORDS,
            *FILES,
            *DIRECTORIES,
            "loop",
            "none.yaml",
            "new/dir",
            *("archive", "watched", "versions", "receipts", "receipt.key", "step 0", "step 1", "3:3", BATCH),
            "own.yaml",
            "testbed:llama",
        ]

    def case(self, seed: int) -> list[str]:
        """Words of a command line: a verb, some of its options, and values of any kind."""
        draw = random.Random(seed)
        verb, options, arguments = draw.choice(VERBS)
        if draw.random() < SOUND:
            words = [*verb, *BASES[verb]]
        else:
            words = [*verb, *draw.choices(self.values, k=draw.choice((0, arguments, arguments + 1)))]
        for option, takes_value in draw.sample(options, min(len(options), draw.randrange(4))):
            words += [option, draw.choice(self.values)] if takes_value else [option]
        return words


def _verbs(command: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any], int]]:
    """Every command with its options, whether each takes a value, and how many arguments it has."""
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            if name not in NOT_HERE:
                yield from _verbs(below, (*above, name))
    if isinstance(command, TyperGroup) and not command.invoke_without_command:
        return
    options = [
        (option, not getattr(parameter, "is_flag", False))
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--") and option not in ("--help", "--version")
    ]
    yield above, options, sum(parameter.param_type_name == "argument" for parameter in command.params)


VERBS = list(_verbs(get_command(app)))


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A command that hangs is as bad as one that crashes."""

    def ring(*_: object) -> None:
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(words: Sequence[str], application: typer.Typer = app) -> object:
    """The exit code."""
    with within(LONGEST_S):
        try:
            main(list(words), application)
        except SystemExit as stop:
            return stop.code
    return 0


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OddPlace:
    monkeypatch.chdir(tmp_path)

    def reached(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(session, "Audit", reached)
    monkeypatch.setattr(session, "Replay", reached)
    monkeypatch.setattr(session.Session, "_within_budget", reached)
    monkeypatch.setattr(blame.Blame, "run", reached)
    monkeypatch.setattr(baseline, "record", reached)
    monkeypatch.setattr(bench, "_measure", reached)
    monkeypatch.setattr(drive.Bisection, "run", reached)
    monkeypatch.setattr(environments.Environments, "releases", reached)
    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", reached)
    return OddPlace(tmp_path)


def _all_end_well(odd: OddPlace, seeds: range) -> None:
    strange = {}
    for seed in seeds:
        code = ended(words := odd.case(seed))
        if code not in FINE:
            strange[" ".join(map(repr, words))] = code
    assert not strange


@pytest.mark.parametrize("first", range(0, CASES, PER_CHUNK))
@pytest.mark.filterwarnings("ignore")
def test_every_command_ends_as_the_contract_says(odd: OddPlace, first: int) -> None:
    _all_end_well(odd, range(first, first + PER_CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("first", range(CASES, LONG, 10 * PER_CHUNK))
@pytest.mark.filterwarnings("ignore")
def test_so_do_ten_times_as_many(odd: OddPlace, first: int) -> None:
    _all_end_well(odd, range(first, min(LONG, first + 10 * PER_CHUNK)))


def test_a_crash_would_be_seen(odd: OddPlace) -> None:
    """Of the net itself: a command with a bug ends in 70, which is not among the codes."""

    def crash() -> None:
        raise ZeroDivisionError

    assert ended(["crash"], make_app({"crash": crash, "other": crash})) not in FINE
    assert {words[0] for words in map(odd.case, range(CASES))} == set(COMMANDS) - set(NOT_HERE)


SECONDS = ("archive", "sync", "view", "init", "env")
"""Verbs that end in a second where what they are given is sound; a gradient would want rewards, and takes longer."""


@pytest.mark.parametrize("verb", [verb for verb in BASES if verb[0] in SECONDS and "gradient" not in verb])
def test_what_cases_begin_with_works(odd: OddPlace, verb: tuple[str, ...]) -> None:
    """Otherwise every odd option of it would be met by one refusal."""
    assert ended([*verb, *BASES[verb]]) == 0
