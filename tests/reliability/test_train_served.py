"""A training whose rollouts a `zerodrift serve` of its own process makes: the same weights as in one process, bit for bit."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parent))

from serving_process import PATIENCE_S, TOKEN
from serving_process import served as served_process

from zerodrift.backends.vllm import VllmBackend
from zerodrift.config.load import load
from zerodrift.core.errors import (
    BadAnswer,
    ConfigError,
    EngineRefused,
    EngineUnreachable,
    FingerprintMismatch,
    ForeignTokens,
    VersionConflict,
)
from zerodrift.train.records import RunFiles
from zerodrift.train.setup import ServerPlace, begin, replay, resume

MODEL = "testbed:llama"
SMALL = (
    f"model.path={MODEL}", "sampling_defaults.max_tokens=3", "train.groups=3", "train.samples=4", "train.warmup_steps=3",
    "train.rescore_one_in=1", "train.checkpoint_every=3", "train.steps=6",
)  # fmt: skip
served = partial(served_process, model=MODEL)


def config(root, url, *settings):
    place = (f"engine.url={url}", f"train.admin_token_file={root / 'token'}", "train.rollouts=serve")
    return load(None, [*SMALL, *place, *settings])


def digests(directory):
    return [each.digest for each in RunFiles(directory).steps()]


def ran(training, steps):
    try:
        training.run(steps)
    finally:
        training.close()
    return training.files.directory


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(root):
    with served(root) as found:
        yield found


@pytest.fixture(scope="module")
def in_process(root):
    """The digests that the engine in this process gives."""
    return digests(ran(begin(load(None, SMALL), root / "in-process"), 6))


def test_it_learns_the_same_bits_as_in_one_process_and_is_replayed(root, server, in_process) -> None:
    directory = ran(begin(config(root, server.url), root / "over-http"), 6)
    files = RunFiles(directory)
    steps, groups = files.steps(), files.groups()
    assert digests(directory) == in_process
    assert [each.rescored for each in steps] == [each.tokens for each in steps]
    assert {each.mismatch for each in steps} == {each.mismatch_largest for each in steps} == {0.0}
    assert max(each.lag for each in steps) == 1
    made = {span.version for group in groups.values() for each in group.outputs for span in each.versions}
    first = files.header().first
    assert {each.digest for each in made} <= {first.digest, *in_process}
    assert TOKEN not in "".join(path.read_text() for path in directory.glob("*.json*"))
    again = replay(directory, root / "scratch")
    found = []
    try:
        again.run(6, found.append)
    finally:
        again.close()
    assert found == steps


def test_a_server_that_is_killed_ends_the_run_by_name_and_another_goes_on(root, tmp_path, in_process) -> None:
    with served(tmp_path) as first:
        training = begin(config(tmp_path, first.url), tmp_path / "run")
        training.run(2)
        first.end()
        with pytest.raises(EngineUnreachable):
            training.run(6)
        training.close()
    assert 2 <= len(RunFiles(tmp_path / "run").steps()) < 6
    with pytest.raises(EngineUnreachable):
        resume(tmp_path / "run")
    with served(tmp_path) as second:
        ran(resume(tmp_path / "run", place=ServerPlace(second.url, str(tmp_path / "token"))), 6)
    assert digests(tmp_path / "run") == in_process


def test_weights_that_others_bring_are_found(root, server, tmp_path, in_process) -> None:
    training = begin(config(root, server.url, "train.max_lag=0"), root / "changed")
    training.run(1)
    # Somebody else has the server call its weights otherwise.
    control = training.source._server.control
    control.post("/update_weight_version", {"new_version": "step 1"})
    with pytest.raises(VersionConflict, match="which is not what was sent"):
        training.run(2)
    # And an update is left open, as by a trainer that was killed in the middle of one.
    control.post("/start_weight_update", {})
    training.close()
    assert len(RunFiles(root / "changed").steps()) == 1
    ran(resume(root / "changed"), 2)
    assert len(digests(root / "changed")) == 2


def damaged(change):
    """The adapter, whose answers are changed on the way."""
    honest = VllmBackend.complete

    def complete(self, request):
        answer = honest(self, request)
        change(answer["choices"][1])
        return answer

    return complete


def cut_logprobs(choice):
    choice["logprobs"]["token_logprobs"].pop()


def no_logprobs(choice):
    choice["logprobs"] = None


def nan(choice):
    choice["logprobs"]["token_logprobs"][0] = float("nan")


def another_token(choice):
    choice["token_ids"][-1] = 1 if choice["token_ids"][-1] != 1 else 2


def foreign(choice):
    choice["token_ids"][0] = 100_000
    choice["logprobs"]["tokens"][0] = "token_id:100000"


def longer(choice):
    told = choice["logprobs"]
    for values in (choice["token_ids"], told["tokens"], told["token_logprobs"], told["top_logprobs"]):
        values.extend(values[-1:] * 4)
    choice["weight_versions"][0]["end"] += 4


def another_index(choice):
    choice["index"] = 0


def other_digest(choice):
    choice["weight_versions"][0]["digest"] = "0" * 64


BAD = [
    (cut_logprobs, BadAnswer), (no_logprobs, BadAnswer), (nan, BadAnswer), (another_token, BadAnswer), (foreign, ForeignTokens),
    (longer, BadAnswer), (another_index, BadAnswer), (other_digest, VersionConflict),
]  # fmt: skip


def test_bad_answers_are_refused_by_name_and_nothing_is_trained_on(
    root, server, monkeypatch, in_process
) -> None:
    training = begin(config(root, server.url, "train.max_lag=0"), root / "bad")
    training.run(1)
    for change, error in BAD:
        training.close()
        with monkeypatch.context() as patch:
            patch.setattr(VllmBackend, "complete", damaged(change))
            training = resume(root / "bad")
            with pytest.raises(error):
                training.run(2)
        assert len(RunFiles(root / "bad").steps()) == 1, change
    training.close()
    ran(resume(root / "bad"), 2)
    assert len(digests(root / "bad")) == 2


def test_what_does_not_fit_is_refused_before_a_run_begins(root, server, tmp_path, monkeypatch) -> None:
    # Below the server's root all of them, but the last one.
    with pytest.raises(EngineRefused, match=r"is not in|lack|has no|unknown"):
        begin(config(root, server.url, "model.path=testbed:qwen3"), root / "refused")
    with monkeypatch.context() as patch:
        patch.setattr("zerodrift.train.setup.numeric_fingerprint", lambda model: {"kernels": "others"})
        with pytest.raises(FingerprintMismatch, match="kernels is zerodrift-exact-1 in the engine"):
            begin(config(root, server.url), root / "refused")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644, and others may read it"):
        begin(config(tmp_path, server.url), root / "refused")
    token.write_text("another-token-than-that")
    token.chmod(0o600)
    with pytest.raises(EngineRefused, match=r"train\.admin_token_file"):
        begin(config(tmp_path, server.url), root / "refused")
    with pytest.raises(EngineRefused, match=r"outside|below|weight root"):
        begin(config(root, server.url), tmp_path / "outside")
    assert not RunFiles(root / "refused").exists
    assert not RunFiles(tmp_path / "outside").exists


def test_a_record_of_before_reads_on(root, in_process) -> None:
    """Steps had no mismatch."""
    (step, *_) = RunFiles(root / "in-process").steps()
    told = msgspec.to_builtins(step)
    del told["mismatch"], told["mismatch_largest"]
    assert msgspec.convert(told, type(step)).mismatch is None
    assert step.mismatch == 0.0


def test_the_command_line(root, server) -> None:
    words = [word for each in (*SMALL, "train.rollouts=serve", f"engine.url={server.url}",
                               f"train.admin_token_file={root / 'token'}") for word in ("--set", each)]  # fmt: skip
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "zerodrift.cli.main", "train", "--steps", "3", "--out", str(root / "cli"), *words],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "mismatch exactly 0 on" in found.stdout, found.stdout
    assert time.monotonic() - began < PATIENCE_S
