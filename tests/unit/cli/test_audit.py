"""One command with verbs beside it: which words go where, and what comes out.

The audit itself is replaced by one that writes down how it was called and gives back a verdict that was prepared; what
it does is tested where it lives.
"""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from zerodrift.audit import session
from zerodrift.cli import console
from zerodrift.cli.main import main
from zerodrift.config.run import RunConfig
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.request import Prompt, Request
from zerodrift.records.case import Case, write_case
from zerodrift.records.directory import write_verdict
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord

ENGINE = EngineFingerprint(engine="vllm", semantic={}, numeric={}, deployment={})


def verdict(outcome: Outcome) -> VerdictRecord:
    failed = outcome is Outcome.FAIL
    fix, found = "--logprobs-mode processed_logprobs", {"evidence": "as raw", "found_by": "attribution"}
    cause = CauseFound(
        cause="semantic/raw-logprobs", gating=True, explained=0.97, interval=(0.9, 1.0), fix=fix, **found
    )
    return VerdictRecord(
        verdict=outcome,
        guilty="engine" if failed else "none",
        message="so it is",
        engine=ENGINE,
        reference=ENGINE,
        model="testbed:llama",
        precision="fp32",
        floor={"mean": 1e-6},
        metrics={"mean": 0.2 if failed else 2e-6},
        gates={"mean": 1e-5},
        causes=(cause,) if failed else (),
        probes=(ProbeRecord(name="parity", status=outcome, required=True, message="measured"),),
    )


class Asked(SimpleNamespace):
    """How the audit was called."""

    config: RunConfig
    directory: Path
    sync: bool
    resets_cache: bool
    wrap: Any = None
    scorer: Any = None
    budget: float | None = None
    environment: bytes


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Every audit that a test started; each ends as its model is called."""
    monkeypatch.chdir(tmp_path)
    calls: list[Asked] = []

    class Recorded(Asked):
        def run(self, progress, reproduce=""):
            progress.stage("score")
            calls.append(self)
            name = (self.config.model.path or "").upper()
            record = verdict(Outcome(name) if name in set(Outcome) else Outcome.PASS)
            self.directory.mkdir(parents=True, exist_ok=True)
            write_verdict(self.directory, record)
            return SimpleNamespace(record=record)

    monkeypatch.setattr(session, "Session", Recorded)
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["audit", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two finished runs below runs/, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, outcome in (("good", Outcome.PASS), ("bad", Outcome.FAIL)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_verdict(tmp_path / "runs" / name, verdict(outcome))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "arguments",
    [
        ("./model", "--engine", "vllm", "--temperature", "0.7"),
        ("--engine", "vllm", "./model", "--temperature", "0.7"),
        ("--engine", "vllm", "--temperature=0.7", "./model"),
        ("--temperature", "0.7", "--engine=vllm", "--", "./model"),
    ],
)
def test_the_model_and_options_stand_in_any_order(asked, arguments):
    assert run(*arguments) == 0
    (call,) = asked
    assert (call.config.model.path, call.config.engine.name) == ("./model", "vllm")
    assert call.directory.parent == Path("runs")
    assert (call.sync, call.resets_cache, call.wrap) == (False, True, None)
    assert call.config.sampling_defaults.temperature == 0.7


@pytest.mark.usefixtures("asked")
def test_json_is_the_record(capsys):
    assert run("FAIL", "--json", "--out", "here") == 1
    assert json.loads(capsys.readouterr().out) == json.loads(Path("here/verdict.json").read_bytes())


def test_every_option_arrives(asked, tmp_path):
    (tmp_path / "own.yaml").write_text("validation: {seed: 5}\n")
    assert run(
        *("testbed:llama", "--url", "http://127.0.0.1:1", "--config", "own.yaml", "--set", "validation.max_tokens=7"),
        *("--prompts", "p.jsonl", "--trials", "99", "--sync", "--no-reset-cache", "--out", "here"),
        *("--inject", "semantic/bos", "--num-prompts", "31"),
    ) == 0  # fmt: skip
    (call,) = asked
    config = call.config
    assert config.validation.num_prompts == 31
    assert (config.validation.seed, config.validation.max_tokens) == (5, 7)
    assert (config.validation.prompts, config.validation.equivalence_trials) == ("p.jsonl", 99)
    assert config.engine.url == "http://127.0.0.1:1"
    assert (call.sync, call.resets_cache, call.directory) == (True, False, Path("here"))
    assert call.wrap is not None
    assert json.loads(call.environment)["python"]
    assert (tmp_path / "here" / "report.html").is_file()


@pytest.mark.parametrize(("arguments", "seconds"), [((), None), (("--budget", "10m"), 600.0)])
def test_a_budget_arrives_in_seconds(asked, arguments, seconds):
    assert run(*arguments) == 0
    assert asked[0].budget == seconds


@pytest.mark.parametrize("word", ["ls", "diff"])
def test_a_model_that_is_called_like_a_verb(asked, word):
    assert run(f"./{word}") == 0
    assert run("--", word) == 0
    assert run("--trials", "64", word) == 0
    assert [call.config.model.path for call in asked] == [f"./{word}", word, word]
    assert run("--out", word, "--task", "sums") == 0
    assert (asked[-1].directory, asked[-1].config.validation.task) == (Path(word), "sums")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("./model ls", "ls"),
        ("one two", "two"),
        ("--format json", "--format"),
        ("ls --engine vllm", "--engine"),
        ("ls a b", "b"),
        ("ls", "zerodrift audit"),
        ("diff", "RUN"),
        ("diff good", "RUN"),
        ("diff good bad ugly", "ugly"),
        ("diff good bad --format yaml", "--format"),
        ("diff good ugly", "zerodrift audit ls"),
        ("--junitxml .", "directory"),
        ("--junitxml /proc/audit.xml", "--junitxml /proc/audit.xml"),
        ("--task sums --prompts p.jsonl", "--task"),
        ("--task=", "task"),
        ("--case case.json", "case.json"),
        ("--no-reset-cache", "--sync"),
        ("--temperature nan", "--temperature: "),
        ("--trials 99999999999", "1000000"),
        ("--trials 8", "--num-prompts"),
        ("--budget soon", "--budget"),
        ("--budget 3s", "--budget"),
        ("--budget 2m --trials 64", "--trials"),
        ("--budget 2m --set validation.num_prompts=4", "--budget"),
    ],
)
def test_wrong_usage_starts_nothing(asked, capsys, arguments, named):
    if "ugly" in arguments:
        Path("good").mkdir()
        write_verdict(Path("good"), verdict(Outcome.PASS))
    assert run(*arguments.split()) == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not asked


@pytest.mark.parametrize(("model", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 3)])
def test_the_exit_code_is_the_verdict(asked, model, code):
    assert run(model) == code
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("first_bad", "measured", "code"), [(None, True, 0), (2, True, 1), (0, None, 1), (None, None, 3)]
)
def test_a_case_is_sent_in_place_of_an_audit(asked, capsys, monkeypatch, first_bad, measured, code):
    def replay(self, case, progress):
        return SimpleNamespace(
            measurement=measured, first_bad=first_bad, tokens=[(7, -1.0, -1.0)], problem=""
        )

    monkeypatch.setattr(Asked, "replay", replay, raising=False)
    write_case(Path("case.json"), Case(requests=(Request(Prompt((5, 6))),), limit=1e-3))
    assert run("--case", "case.json") == code
    assert "prompt of 2 tokens" in capsys.readouterr().out
    assert not asked, "no audit was run"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("--inject", "semantic/raw-logprobs"), "--temperature 0.7"),
        (("--inject", "semantic/temperature:ignored"), "--temperature 0.7"),
        (("--inject", "weights/stale"), "--sync"),
        (("--inject", "weights/stale-prefix-cache", "--sync"), "--no-reset-cache"),
    ],
)
def test_a_fault_that_could_not_be_seen_is_refused(asked, capsys, arguments, cure):
    """Its PASS would be taken for the auditor's blindness."""
    assert run(*arguments) == 2
    assert f"add {cure}" in " ".join(capsys.readouterr().err.split())
    assert not asked
    assert run(*arguments, *cure.split()) == 0
    assert run("--inject", "list") == 0
    assert arguments[1] in capsys.readouterr().out


@pytest.mark.usefixtures("asked")
def test_a_junit_file_on_request(tmp_path):
    assert run("fail", "--junitxml", "build/audit.xml") == 1
    root = ElementTree.fromstring((tmp_path / "build" / "audit.xml").read_bytes())
    assert root.get("failures") == "1"


def test_ls(runs, capsys):
    (runs / "none").mkdir()
    assert run("ls", str(runs / "none")) == 0
    assert "none" in capsys.readouterr().out
    (runs / "none").rmdir()
    assert run("ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "when", "verdict"]
    assert {line.split()[0] for line in lines[1:]} == {"good", "bad"}
    assert run("ls", str(runs), "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    found = {entry["name"]: (entry["cause"], entry["mean"]) for entry in listed}
    assert found == {"good": (None, 2e-6), "bad": ("semantic/raw-logprobs", 0.2)}


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("before", "after", "code"), [("good", "bad", 1), ("bad", "good", 0), ("bad", "runs/bad", 0)]
)
def test_diff(before, after, code, capsys):
    assert run("diff", before, after) == code
    text = capsys.readouterr().out
    assert text.startswith(f"{before} → {Path(after).name}\n")
    assert "outcome" in text
    assert run("diff", "--json", before, after) == code
    told = json.loads(capsys.readouterr().out)
    assert told["worse"] is bool(code)
    assert told["message"]
    assert told["numbers"][0]["name"] == "mean |Δ|"


def test_errors_of_a_verb_keep_their_traceback(tmp_path, monkeypatch, capsys):
    """Global options stand before `audit`, and reach what stands behind it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--debug", "audit", "ls"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("runs")
def test_verbs_load_no_torch():
    import subprocess
    import sys

    for arguments in ("['audit', 'ls']", "['audit', 'diff', 'good', 'bad']", "['audit', '--help']"):
        code = (
            "import sys\nfrom zerodrift.cli.main import main\n"
            f"try:\n    main({arguments})\nexcept SystemExit:\n    pass\n"
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["100", "testbed:", "null", "a: b"])
def test_names_are_taken_as_they_are(asked, name):
    run(name)
    assert asked[0].config.model.path == name


def test_an_interruption_says_how_to_go_on(monkeypatch, capsys):
    class Interrupted(Asked):
        directory = Path("runs")

        def run(self, progress, reproduce=""):
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "Session", Interrupted)
    assert run() == 130
    assert "with --out runs/audit-" in capsys.readouterr().err
    assert run("--out", "mine") == 130
    assert "repeat the same command" in capsys.readouterr().err


def test_a_bar_is_gone_before_that_is_said(monkeypatch):
    class Interrupted(Asked):
        directory = Path("runs")

        def run(self, progress, reproduce=""):
            bars.append(progress)
            live.append(progress._bar.live.is_started)
            raise KeyboardInterrupt

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    bars, live = [], []
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(session, "Session", Interrupted)
    monkeypatch.setattr(console, "note", lambda _: live.append(bars[0]._bar.live.is_started))
    assert run() == 130
    assert live == [True, False]


def test_a_fault_of_the_trainer_is_planted_there(asked, capsys):
    assert run("--inject", "trainer/packing") == 0
    (call,) = asked
    assert call.wrap is None
    assert call.scorer is not None
    assert run("--inject", "trainer/packing", "--trainer", "transformers") == 2
    assert "leave out --trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("--temperature 0.6 --engine exact", "add --engine reference"),
        ("--set sampling_defaults.top_p=0.9", "leave out top_p"),
    ],
)
def test_a_fault_that_no_such_engine_can_have_is_refused_before_anything_runs(asked, capsys, options, cure):
    """It ran for minutes, and ended with the command that was typed as its advice."""
    assert run("--inject", "semantic/sampling-bias:hotter-1.2", *options.split()) == 2
    assert cure in " ".join(capsys.readouterr().err.split())
    assert not asked


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ("path/prefix-cache", "reference"),
        ("path/prefix-cache --engine exact", "exact"),
        ("path/rope", "exact"),
        # What was requested and not drawn is scored at temperature 1, and nowhere else but in the reference.
        ("semantic/sampling-bias:hotter-1.2", "exact"),
        ("semantic/sampling-bias:hotter-1.2 --temperature 0.6", "reference"),
    ],
)
def test_a_fault_that_needs_the_reference_gets_it_where_nobody_said_otherwise(asked, options, engine, capsys):
    assert run("--inject", *options.split()) == 0
    assert [call.config.engine.name for call in asked] == [engine]
    assert ("reference engine" in capsys.readouterr().err) is (engine == "reference")
