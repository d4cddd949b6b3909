"""From a configuration to a directory. The engine offers nothing beyond generating, so that the rungs are cheap."""

import copy
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from zerodrift.audit import observe
from zerodrift.audit.progress import Silent
from zerodrift.audit.run import Audited
from zerodrift.audit.session import PRECISIONS, Session, command_line, precision_of
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.vllm_facts import KEPT_BACK
from zerodrift.config.load import dump, load
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.core.completion import Answer, EngineFingerprint
from zerodrift.core.errors import ConfigError, EngineUnreachable, RecordError, ZerodriftError
from zerodrift.models.testbed_config import CONTEXT_LENGTH
from zerodrift.models.warmup import problems
from zerodrift.records import directory as files
from zerodrift.records.codec import read_lines
from zerodrift.records.lock import only_writer
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome, ProbeRecord, VerdictRecord
from zerodrift.tasks.sums import Sums


def bare(engine: Backend) -> Backend:
    stripped = copy.copy(engine)
    stripped.capabilities = frozenset()
    return stripped


def config(**sections: dict[str, Any]) -> RunConfig:
    values = {
        "model": {"path": "testbed:llama"},
        "engine": {"name": "reference"},
        "sampling_defaults": {"temperature": 0.7},
        "validation": {"num_prompts": 3, "equivalence_trials": 4, "max_tokens": 5},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return msgspec.convert(values, RunConfig)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    session = Session(config=config(), directory=tmp_path_factory.mktemp("runs") / "deep" / "run", wrap=bare)
    return session, session.run(Silent(), "zerodrift audit")


def test_a_run_leaves_its_files(finished):
    session, audited = finished
    verdict = files.read_verdict(session.directory)
    assert verdict == audited.record
    assert verdict.reproduce == "zerodrift audit"
    assert verdict.verdict is Outcome.INCONCLUSIVE, "twenty tokens decide nothing"
    assert verdict.precision == "fp32"
    assert load(session.directory / files.CONFIG) == session.config
    assert len(list(read_lines(session.directory / files.ROLLOUTS, Rollout))) == 4


def test_every_token_is_in_the_table_with_its_text(finished):
    session, audited = finished
    rows = pq.read_table(session.directory / files.TOKENS).to_pydict()
    assert rows["token"] == audited.table.token.tolist()
    assert rows["reported"] == audited.table.reported.tolist()
    assert all(isinstance(text, str) for text in rows["text"])


def test_sampling_is_the_configured_one_with_the_audits_length(finished):
    session, _ = finished
    for rollout in read_lines(session.directory / files.ROLLOUTS, Rollout):
        assert rollout.request.sampling.temperature == 0.7
        assert rollout.request.sampling.max_tokens == 5


def unfinished(session: Session, directory: Path) -> Session:
    """The run as a kill before its verdict would have left it."""
    shutil.copytree(session.directory, directory)
    (directory / files.VERDICT).unlink()
    return msgspec.structs.replace(session, directory=directory)


def test_a_finished_run_is_not_judged_again(finished):
    """Its answers are old: an engine that broke since would pass."""
    session, _ = finished
    with pytest.raises(RecordError, match="holds a finished run; choose another --out"):
        session.run(Silent())


def test_an_unfinished_run_goes_on_without_asking_again(finished, tmp_path):
    session, audited = finished
    asked = []

    def watched(engine):
        stripped = bare(engine)
        stripped.generate = lambda requests: asked.append(requests) or []
        return stripped

    stopped = msgspec.structs.replace(unfinished(session, tmp_path / "run"), wrap=watched)
    again = stopped.run(Silent(), "zerodrift audit")
    assert asked == []
    assert again.record.metrics == audited.record.metrics
    assert again.record.verdict is audited.record.verdict


@pytest.mark.parametrize("change", [{"planted": "semantic/raw-logprobs"}, {"sync": True}])
def test_an_unfinished_run_of_something_else_is_refused(finished, tmp_path, change):
    stopped = msgspec.structs.replace(unfinished(finished[0], tmp_path / "run"), **change)
    with pytest.raises(RecordError, match="another fault, update or checkpoint"):
        stopped.run(Silent())


class Dying:
    """Answers the first request that it is asked, and no other until it is healed."""

    def __init__(self, inner: Backend) -> None:
        self.inner = bare(inner)
        self.left = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, requests: Any) -> list[Answer]:
        if self.left < len(requests):
            raise EngineUnreachable("connection refused")
        self.left -= len(requests)
        return self.inner.generate(requests)


def test_a_run_whose_engine_died_can_be_resumed(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(observe, "BATCH", 1)
    died = msgspec.structs.replace(finished[0], directory=tmp_path / "run", wrap=Dying)
    record = died.run(Silent(), "zerodrift audit").record
    assert record.verdict is Outcome.INCONCLUSIVE
    assert "what was answered is kept, and the run can be resumed" in record.message
    kept = list(read_lines(tmp_path / "run" / files.ROLLOUTS, Rollout))
    assert {rollout.index for rollout in kept} == {0}
    again = msgspec.structs.replace(died, wrap=bare).run(Silent(), "zerodrift audit")
    assert again.record.metrics == finished[1].record.metrics
    assert files.read_verdict(died.directory) == again.record


def test_an_engine_that_cannot_be_reached_leaves_nothing_behind(tmp_path):
    there = config(engine={"name": "vllm", "url": "http://127.0.0.1:1"})
    with pytest.raises(EngineUnreachable):
        Session(config=there, directory=tmp_path / "run", environment=b"{}").run(Silent())
    assert list(tmp_path.iterdir()) == []


def test_where_prompts_come_from_is_told(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"prompt": [{5 + n}, 6]}}\n' for n in range(4)))
    mixed = config(validation={"prompts": str(path), "num_prompts": 5, "equivalence_trials": 5})
    audited = Session(config=mixed, directory=tmp_path / "run", wrap=bare).run(Silent())
    (contract,) = [probe for probe in audited.record.probes if probe.name == "contract"]
    assert "5 completions of 4 prompts of mine.jsonl and 1 generated" in contract.message


def test_answers_of_another_engine_are_refused(finished, tmp_path):
    def other(engine):
        stripped = bare(engine)
        there = engine.fingerprint()
        stripped.fingerprint = lambda: msgspec.structs.replace(there, numeric={"dtype": "float32"})
        return stripped

    stopped = msgspec.structs.replace(unfinished(finished[0], tmp_path / "run"), wrap=other)
    with pytest.raises(RecordError, match="holds answers of an engine with fingerprint"):
        stopped.run(Silent())


def test_nothing_to_compare_leaves_a_verdict_and_no_table(tmp_path):
    def mute(engine):
        stripped = bare(engine)
        stripped.generate = lambda requests: [Answer(())] * len(requests)
        return stripped

    Session(config=config(), directory=tmp_path, wrap=mute).run(Silent())
    assert files.read_verdict(tmp_path).verdict is Outcome.INCONCLUSIVE
    assert not (tmp_path / files.TOKENS).exists()


def test_another_configuration_is_refused(finished, tmp_path):
    stopped = unfinished(finished[0], tmp_path / "run")
    other = msgspec.structs.replace(stopped, config=config(validation={"seed": 1}))
    with pytest.raises(RecordError, match="another configuration"):
        other.run(Silent())


def test_no_room_for_a_prompt(tmp_path):
    too_long = config(validation={"max_tokens": CONTEXT_LENGTH})
    with pytest.raises(ConfigError, match=f"max_tokens={CONTEXT_LENGTH} leaves no room"):
        Session(config=too_long, directory=tmp_path, wrap=bare).run(Silent())


def test_prompts_of_ones_own(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [5, 6, 7]}\n{"prompt": "the"}\n')
    own = config(validation={"prompts": str(file), "num_prompts": 2})
    session = Session(config=own, directory=tmp_path / "run", wrap=bare)
    session.run(Silent())
    prompts = {r.request.prompt.token_ids for r in read_lines(session.directory / files.ROLLOUTS, Rollout)}
    assert (5, 6, 7) in prompts
    assert len(prompts) == 2


def test_a_reference_in_the_dtype_that_was_asked_for(tmp_path):
    narrow = config(validation={"reference_dtype": "float32", "reference_model": "testbed:llama"})
    audited = Session(config=narrow, directory=tmp_path, wrap=bare).run(Silent())
    assert audited.record.reference.numeric["dtype"] == "float32"


@pytest.mark.parametrize(
    ("sections", "sync", "written"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"engine": {"name": "vllm", "url": "http://127.0.0.1:9"}}, False, True),
    ],
)
def test_a_testbed_model_is_written_out_where_an_engine_needs_files(tmp_path, sections, sync, written):
    session = Session(config=config(**sections), directory=tmp_path, sync=sync)
    checkpoint = session._checkpoint("testbed:llama", tmp_path)
    assert (checkpoint is not None) is written
    if checkpoint is not None:
        assert (checkpoint / "model.safetensors").is_file()
    assert session._checkpoint(str(tmp_path), tmp_path / "run") == tmp_path, (
        "a model of one's own is served from where it is"
    )


@pytest.mark.parametrize(("dtype", "precision"), [*PRECISIONS.items(), ("torch.bfloat16", Precision.BF16)])
def test_the_gates_hang_on_what_the_engine_says_it_computes_in(dtype, precision):
    said = EngineFingerprint(engine="x", semantic={}, numeric={"dtype": dtype}, deployment={})
    assert precision_of(said) is precision


@pytest.mark.parametrize("numeric", [{}, {"dtype": "int4"}])
def test_an_engine_that_does_not_say_is_not_guessed_at(numeric):
    said = EngineFingerprint(engine="x", semantic={}, numeric=numeric, deployment={})
    with pytest.raises(ConfigError, match=r"validation\.precision=fp32\|bf16\|fp8"):
        precision_of(said)


def test_settings_that_are_kept_back_are_asked_for_with_the_token():
    """A 401 is another thing than a server that has no such route."""
    said = EngineFingerprint(
        engine="vllm", semantic={}, numeric={}, deployment={KEPT_BACK: "/server_info (401)"}
    )
    with pytest.raises(ConfigError, match=r"/server_info \(401\).*token.*engine\.api_key_env=NAME"):
        precision_of(said)


def test_how_to_type_it_again():
    assert command_line(["audit", "--set", "a b=1"]) == "zerodrift audit --set 'a b=1'"


@pytest.mark.parametrize("out", [["--out", "runs/x"], ["--out=runs/x"]])
def test_a_finished_directory_is_not_part_of_what_is_typed_again(out):
    """One with a verdict is refused, so the command would not run as it is printed."""
    assert command_line(["audit", *out, "--trials", "40"]) == "zerodrift audit --trials 40"


@pytest.mark.parametrize(
    ("cut_off", "told"), [(True, "zerodrift audit --out 'a run'"), (False, "zerodrift audit")]
)
def test_only_a_run_that_was_cut_off_is_taken_up_again(cut_off, told):
    probe = ProbeRecord(
        name="contract", status=Outcome.INCONCLUSIVE, required=True, message="died", cut_off=cut_off
    )
    nobody = EngineFingerprint(engine="x", semantic={}, numeric={}, deployment={})
    record = VerdictRecord(
        verdict=Outcome.INCONCLUSIVE,
        guilty="unknown",
        message="died",
        engine=nobody,
        reference=nobody,
        model="m",
        precision="fp32",
        floor={},
        metrics={},
        gates={},
        probes=(probe,),
    )
    session = Session(config=config(), directory=Path("a run"))
    audited = session._with_commands(Audited(record, None, ()), "zerodrift audit")
    assert audited.record.reproduce == told


# --- refused before the directory is touched --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "error", "says"),
    [
        ({"model": {"path": "nowhere"}}, ZerodriftError, "nowhere"),
        ({"engine": {"url": "http://127.0.0.1:1"}}, ConfigError, "name its kind: --engine vllm"),
        ({"engine": {"name": "vlm"}}, ConfigError, "did you mean 'vllm'"),
        ({"validation": {"trainer": "nobody:scorer"}}, ConfigError, "no module 'nobody'"),
        ({"validation": {"baseline": "none.jsonl"}}, RecordError, "there is no baseline"),
        ({"validation": {"task": "nothing"}}, ConfigError, "names nothing; write sums"),
        ({"validation": {"task": "nobody:task"}}, ConfigError, "no module 'nobody'"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(tmp_path, sections, error, says):
    with pytest.raises(error, match=says):
        Session(config=config(**sections), directory=tmp_path / "run").run(Silent())
    assert not (tmp_path / "run").exists()


def test_a_directory_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RecordError, match="holds other things than a run"):
        Session(config=config(), directory=tmp_path).run(Silent())
    with pytest.raises(RecordError, match="is a file"):
        Session(config=config(), directory=tmp_path / "model.safetensors").run(Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_directory_has_one_writer(tmp_path):
    (tmp_path / files.CONFIG).write_text(dump(config()))
    session = Session(config=config(), directory=tmp_path, wrap=bare)
    with (
        only_writer(tmp_path / files.LOCK, tmp_path),
        pytest.raises(RecordError, match="another process is writing"),
    ):
        session.run(Silent())


# --- prompts ----------------------------------------------------------------------------------------------------


def prompts_of(tmp_path: Path, llama: ReferenceBackend, **validation: Any) -> list[Any]:
    session = Session(config=config(validation={"max_tokens": 4, **validation}), directory=tmp_path)
    return session._prompts(llama, 1200).prompts


def test_a_fifth_is_generated_beside_a_file(tmp_path, llama):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": [{5 + n}, 6]}}\n' for n in range(20)))
    options = {"prompts": str(path), "num_prompts": 10, "equivalence_trials": 10}
    mixed = prompts_of(tmp_path, llama, **options)
    assert len(mixed) == 10
    assert [prompt.token_ids for prompt in mixed[:8]] == [(5 + n, 6) for n in range(8)]
    assert mixed[8:] == prompts_of(tmp_path, llama, num_prompts=2, equivalence_trials=2)
    alone = prompts_of(tmp_path, llama, **options, property_based_prompts=False)
    assert [prompt.token_ids for prompt in alone] == [(5 + n, 6) for n in range(10)]


def test_position_probes_end_where_they_say(tmp_path, llama):
    probes = prompts_of(tmp_path, llama, position_probes=(0.5, 1.0, 1.1), equivalence_trials=6)[:3]
    assert [len(prompt.token_ids) + 4 for prompt in probes] == [
        round(share * CONTEXT_LENGTH) for share in (0.5, 1.0, 1.1)
    ]
    with pytest.raises(
        ConfigError, match=r"position probe 2 is a sequence of \d+ tokens; the engine takes 1200"
    ):
        prompts_of(tmp_path, llama, position_probes=(2.0,))


def test_no_prompt_is_longer_than_training_will_see(tmp_path, llama):
    session = Session(
        config=config(model={"max_model_len": 12}, sampling_defaults={"max_tokens": 5}), directory=tmp_path
    )
    assert max(len(prompt.token_ids) for prompt in session._prompts(llama, 1200).prompts) <= 12 - 5


def test_a_task_asks_its_own_prompts_and_no_others(tmp_path, llama):
    session = Session(config=config(validation={"task": "sums"}), directory=tmp_path)
    posed = session._posed("testbed:llama", llama)
    assert posed is not None
    prompts = session._prompts(llama, 1200, posed).prompts
    assert prompts == Sums("testbed:llama").prompts(3, seed=0)
    with pytest.raises(ConfigError, match="task 'sums': prompt 0 has 4 tokens"):
        session._prompts(llama, 8, posed)


def test_a_run_with_a_task_leaves_what_the_reference_answered(tmp_path):
    audited = Session(config=config(validation={"task": "sums"}), directory=tmp_path, wrap=bare).run(Silent())
    (record,) = [record for record in audited.record.probes if record.name == "rewards"]
    assert (record.status, record.vacuous, record.required) == (Outcome.INCONCLUSIVE, True, True)
    assert "every reward is 0" in record.message, "nobody taught it to add"
    assert len(list(read_lines(tmp_path / files.REFERENCE, Rollout))) == 4
    assert all(
        r.request.prompt.text in dict(problems()) for r in read_lines(tmp_path / files.ROLLOUTS, Rollout)
    )
