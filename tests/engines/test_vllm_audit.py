"""The audit on real vLLM servers: their own defaults are the faults, and their own flags the fixes.

A test names its server as changes to docs/vllm.yaml; docs/vllm.md shows the same audits as commands. A server takes
up to a minute to start, so there is one per configuration, and the next one starts while one is audited.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.audit.preflight import Preflight
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session, Wrap
from zerodrift.backends.base import Backend
from zerodrift.backends.launch import LaunchedServer
from zerodrift.backends.vllm_launch import flags, launch_vllm
from zerodrift.backends.vllm_routes import FLAG
from zerodrift.config.load import dump, load
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import EngineRefused
from zerodrift.core.version import WeightVersion
from zerodrift.faults.sampling import write_model_with_defaults
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.models.directory import WEIGHTS
from zerodrift.models.smollm2 import COMPLETE
from zerodrift.records.directory import read_verdict
from zerodrift.records.preflight import Item, Status
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.text import print_verdict

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "vllm.yaml"
PYTHON = ROOT / ".engines" / os.environ.get("ZERODRIFT_TEST_ENGINE", "vllm-0.32.0") / "bin" / "python"
COOL = "sampling_defaults.temperature=0.7"
FEW = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")
"""Enough for Δ. The sampling test needs more: 369 tokens with top-p 0.9 gave p = 2e-5, and it fails at 1e-6."""
MANY = ("validation.num_prompts=32", "validation.equivalence_trials=64", "validation.max_tokens=32")


class Setup(NamedTuple):
    """A server: what it serves, and what is changed in docs/vllm.yaml."""

    name: str
    model: str = "qwen3"
    changes: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        return load(CONFIG, self.changes)


# One more route is open; a server without it is the negative control.
HEALTHY = Setup("healthy", changes=(f"engine.args=[{FLAG}]",))
# vLLM's own defaults. At temperature 1 raw and processed logprobs are the same, so one server shows either fault.
AS_IT_COMES = Setup(
    "as-it-comes",
    changes=("engine.logprobs_mode=raw_logprobs", "engine.env={VLLM_CPU_ATTN_SPLIT_KV: '1'}"),
)
FILLED = Setup("filled", "qwen3-with-defaults", ("engine.generation_config=auto",))
FILLED_RAW = Setup(
    "filled-raw", "qwen3-with-defaults", (*FILLED.changes, "engine.logprobs_mode=raw_logprobs")
)
# With AMX vLLM takes products of torch's for bf16 that need all of oneDNN, and its worker ends where that is kept to AVX2.
AMX = ("engine.env.ONEDNN_MAX_CPU_ISA=ALL",) if torch.cpu._is_amx_tile_supported() else ()
BF16 = Setup("bf16", changes=("model.dtype=bfloat16", *AMX))
BF16_HEAD = Setup("bf16-head", changes=(*BF16.changes, "engine.head_dtype=float32"))
# A context of 160 keeps the probes' prompts at one cache block and a little: prompts of 300 took five minutes.
SMOLLM2 = Setup("smollm2", "smollm2", ("engine.max_model_len=160", "engine.env={OMP_NUM_THREADS: '1'}"))


class Server(NamedTuple):
    """One that answers."""

    url: str
    model: Path


class Starts:
    """Starts servers in the order in which tests will ask for them, always one ahead."""

    def __init__(self, setups: Sequence[Setup], start: Callable[[Setup], LaunchedServer]) -> None:
        self._order = list(dict.fromkeys(setups))
        self._start = start
        self._pool = ThreadPoolExecutor(1)
        self._started: dict[Setup, Future[LaunchedServer]] = {}

    def take(self, setup: Setup) -> LaunchedServer:
        for wanted in self._order[: self._order.index(setup) + 2]:
            if wanted not in self._started:
                self._started[wanted] = self._pool.submit(self._start, wanted)
        return self._started[setup].result()

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for started in self._started.values():
            if not started.cancelled() and started.exception() is None:
                started.result().stop()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by name; SmolLM2 only where it is there."""
    root = tmp_path_factory.mktemp("models")
    found = {
        "qwen3": models.materialise("testbed:qwen3", root / "qwen3"),
        "qwen3-with-defaults": write_model_with_defaults("testbed:qwen3", root / "qwen3-with-defaults"),
    }
    smollm2 = ROOT / ".cache" / "smollm2"
    return found | ({"smollm2": smollm2} if (smollm2 / COMPLETE).is_file() else {})


@pytest.fixture(scope="module")
def starts(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starts]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parents[1].name} is not installed: engines/install {PYTHON.parents[1].name}")
    logs = tmp_path_factory.mktemp("logs")

    def start(setup: Setup) -> LaunchedServer:
        config, log = setup.config, logs / f"{setup.name}.log"
        arguments = flags(config.engine, config.model.dtype)
        patience = config.engine.startup_timeout_s
        return launch_vllm(PYTHON, checkpoints[setup.model], arguments, config.engine.env, log, patience)

    mine = (item for item in request.session.items if item.path == request.path)
    asked_for: list[Setup] = [item.callspec.params["server"] for item in mine]  # type: ignore[attr-defined]
    with contextlib.chdir(ROOT):
        starts = Starts([setup for setup in asked_for if setup.model in checkpoints], start)
        yield starts
        starts.stop()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, starts: Starts, checkpoints: dict[str, Path]) -> Iterator[Server]:
    setup: Setup = request.param
    if setup.model not in checkpoints:
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    with starts.take(setup) as launched:
        yield Server(launched.url, checkpoints[setup.model])


def served_by(setup: Setup, *others: Setup) -> pytest.MarkDecorator:
    """The test runs on this server, or once on each of these."""
    setups = (setup, *others)
    return pytest.mark.parametrize("server", setups, indirect=True, ids=[setup.name for setup in setups])


Audit = Callable[..., VerdictRecord]


@pytest.fixture(scope="module")
def audited() -> dict[tuple[object, ...], VerdictRecord]:
    """What was found already, by server and changes: an audit that changes nothing is not run twice."""
    return {}


@pytest.fixture
def audit(server: Server, audited: dict[tuple[object, ...], VerdictRecord], tmp_path: Path) -> Audit:
    """Audits the server; the verdict is printed, and shown by pytest where the test fails."""

    def run(*changes: str, sync: bool = False, wrap: Wrap | None = None) -> VerdictRecord:
        if not sync and (server, changes) in audited:
            return audited[server, changes]
        where = (f"engine.url={server.url}", "engine.python=null", f"model.path={server.model}")
        session = Session(
            config=load(CONFIG, (*FEW, *where, *changes)),
            directory=tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
            sync=sync,
            wrap=wrap,
        )
        record = session.run(Silent()).record
        print_verdict(record, Console(highlight=False, width=110), None)
        if not sync:
            audited[server, changes] = record
        return record

    return run


HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


def probe(record: VerdictRecord, name: str) -> ProbeRecord:
    [found] = [probe for probe in record.probes if probe.name == name]
    return found


def measured(record: VerdictRecord, name: str, what: str) -> float:
    return float(probe(record, name).evidence[what])


def principal(record: VerdictRecord) -> CauseFound:
    """Of a failed audit: what it blames."""
    assert record.verdict is Outcome.FAIL
    assert record.guilty == "engine"
    assert record.causes[0].gating
    return record.causes[0]


def assert_the_same_policy(record: VerdictRecord) -> None:
    assert record.verdict is Outcome.PASS
    assert not [cause.cause for cause in record.causes if cause.gating]


def assert_every_bit_equal(record: VerdictRecord) -> None:
    """Repeated, out of the cache, streamed; and in a batch and as a prompt, but for a processor without AVX-512."""
    # Six requests of eight tokens; half of them are repeated.
    compared = {"repeat": 24, "cache": 48, "stream": 48}
    if HAS_AVX512:
        assert record.causes == ()
        compared |= {"batch": 48, "prefill-decode": 48}
    else:
        # Seen on an AMD EPYC, family 25 model 1: up to 31 of 48 tokens differ in a batch or as a prompt, by 1.7e-6. Listed, and
        # no fault. Why was not looked into: processors with AVX-512 that are kept to AVX2 do not show it (docs/vllm.md).
        known = {("path/batch-variance", False), ("path/prefill-decode", False)}
        assert {(cause.cause, cause.gating) for cause in record.causes} <= known
    for name, tokens in compared.items():
        asked = probe(record, name)
        assert (asked.status, asked.vacuous) == (Outcome.PASS, False), name
        assert (measured(record, name, "tokens"), measured(record, name, "differing")) == (tokens, 0), name
    assert measured(record, "cache", "cached_tokens") > 0
    assert 6 < measured(record, "stream", "pieces") <= 48


@served_by(HEALTHY)
def test_a_healthy_server_passes_and_every_bit_is_equal(audit: Audit) -> None:
    record = audit()

    assert_the_same_policy(record)
    assert record.precision == "fp32"
    assert record.metrics["mean"] <= 1e-5
    assert_every_bit_equal(record)


@served_by(HEALTHY)
def test_ids_in_and_ids_out_are_the_same_engine(audit: Audit) -> None:
    record, other = audit("engine.route=generate"), audit()

    assert_the_same_policy(record)
    assert_every_bit_equal(record)
    # Prompts begin alike, and which of them find a prefix in the cache is up to time: means of 2.399e-6 and 2.412e-6 were seen
    # on either route.
    assert record.metrics["tokens"] == other.metrics["tokens"]
    assert record.metrics["mean"] == pytest.approx(other.metrics["mean"], rel=0.02)
    assert record.engine.deployment == {**other.engine.deployment, "route": "/inference/v1/generate"}


@served_by(AS_IT_COMES)
def test_a_route_that_is_closed_is_named_with_the_flag_that_opens_it(audit: Audit) -> None:
    with pytest.raises(EngineRefused):
        audit("engine.route=generate")


@pytest.mark.smollm2
@served_by(SMOLLM2)
def test_so_does_one_with_trained_weights(audit: Audit) -> None:
    record = audit()

    assert_the_same_policy(record)
    assert record.metrics["mean"] <= 1e-5
    assert_every_bit_equal(record)


@served_by(AS_IT_COMES)
def test_the_default_logprobs_are_raw(audit: Audit) -> None:
    cause = principal(audit(COOL))

    assert cause.cause == "semantic/raw-logprobs"
    assert cause.fix == "--logprobs-mode processed_logprobs"
    assert cause.explained > 0.99
    assert is_typed(cause.fix, HEALTHY)
    assert not is_typed(cause.fix, AS_IT_COMES)


@served_by(HEALTHY)
def test_the_fix_for_raw_logprobs_fixes_them(audit: Audit) -> None:
    assert_the_same_policy(audit(COOL))


def assert_defaults_are_named(record: VerdictRecord) -> None:
    cause = principal(record)
    assert cause.cause == "semantic/generation-config"
    assert "top_p=0.9" in cause.evidence
    assert "repetition_penalty=1.05" in cause.evidence
    assert cause.fix == "--generation-config vllm"
    assert is_typed(cause.fix, HEALTHY)
    assert not is_typed(cause.fix, FILLED)


@served_by(FILLED)
def test_sampling_defaults_of_the_model_are_named(audit: Audit) -> None:
    record = audit()

    assert_defaults_are_named(record)
    assert probe(record, "parity").status is Outcome.FAIL


@served_by(FILLED_RAW)
def test_raw_logprobs_hide_them_from_all_but_the_sampling_probe(audit: Audit) -> None:
    record = audit(*MANY)

    assert_defaults_are_named(record)
    assert probe(record, "parity").status is Outcome.PASS
    assert record.metrics["mean"] <= 1e-5
    assert probe(record, "sampling").status is Outcome.FAIL


@served_by(AS_IT_COMES)
def test_split_attention_is_listed_and_does_not_gate(audit: Audit) -> None:
    """Needs two threads: one has nobody to split with. The healthy server has two as well, and no split."""
    record = audit()

    assert_the_same_policy(record)
    listed = {cause.cause: cause for cause in record.causes}
    assert "VLLM_CPU_ATTN_SPLIT_KV=0" in listed["path/batch-variance"].fix
    assert "path/prefill-decode" in listed
    assert measured(record, "batch", "differing") > 0
    assert measured(record, "repeat", "differing") == 0


@served_by(HEALTHY)
def test_another_model_behind_the_address_is_said_so(audit: Audit) -> None:
    """It has as many tokens and the same tokenizer: nothing that the server shows tells."""
    record = audit("model.path=testbed:llama")

    assert principal(record).cause == "weights/other-model"
    assert [cause.cause for cause in record.causes if cause.gating] == ["weights/other-model"]
    assert probe(record, "tokenizer").evidence["differing"] == 0


class Checked(NamedTuple):
    """A checklist before a run, and the verdict of the audit in it, which pushes an update."""

    items: dict[str, Item]
    verdict: VerdictRecord


@pytest.fixture(scope="module")
def checklists() -> dict[bool, Checked]:
    """What was found already, by whether the cache was reset."""
    return {}


@pytest.fixture
def checked(
    request: pytest.FixtureRequest, server: Server, checklists: dict[bool, Checked], tmp_path: Path
) -> Checked:
    resets: bool = request.param
    if resets not in checklists:
        where = (f"engine.url={server.url}", "engine.python=null", f"model.path={server.model}")
        path, directory = tmp_path / "run.yaml", tmp_path / "run"
        path.write_text(dump(config := load(CONFIG, (*FEW, *where))))
        checklist = Preflight(path=path, config=config, directory=directory, resets_cache=resets)
        items = {item.name: item for item in checklist.run(Silent()).items}
        checklists[resets] = Checked(items, read_verdict(directory))
        print_verdict(checklists[resets].verdict, Console(highlight=False, width=110), None)
    return checklists[resets]


@served_by(HEALTHY)
@pytest.mark.parametrize("checked", [False], indirect=True)
def test_an_update_without_a_cache_reset_leaves_stale_prefixes(checked: Checked) -> None:
    cause = principal(checked.verdict)

    assert cause.cause == "weights/stale-prefix-cache"
    assert cause.explained > 0.99
    assert "POST /reset_prefix_cache" in cause.fix


@served_by(HEALTHY)
@pytest.mark.parametrize("checked", [True], indirect=True)
def test_an_update_with_a_cache_reset_passes(checked: Checked) -> None:
    record = checked.verdict

    assert_the_same_policy(record)
    assert probe(record, "weight-sync").status is Outcome.PASS
    assert measured(record, "weight-sync", "slope") == pytest.approx(1, abs=1e-3)


@served_by(HEALTHY)
@pytest.mark.parametrize(
    ("checked", "expected"), [(True, Status.PASS), (False, Status.FAIL)], indirect=["checked"]
)
def test_the_checklist_before_a_run_asks_the_server_too(
    server: Server, checked: Checked, expected: Status
) -> None:
    # Dev mode is open to this machine, and the doctor says so; nothing is wrong.
    assert checked.items["doctor"].status in (Status.PASS, Status.WARN)
    assert server.url in checked.items["doctor"].message
    assert checked.items["weight-sync"].status is expected
    assert checked.items["audit"].status is Status.PASS


class LosesOneLayer(FaultyBackend):
    """Every update arrives but for one layer, which stays as the server started with it."""

    def __init__(self, inner: Backend, layer: int, started_with: Path, scratch: Path) -> None:
        super().__init__(inner)
        self._prefix = f"model.layers.{layer}."
        self._old = load_file(started_with / WEIGHTS)
        self._scratch = scratch

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        shutil.copytree(directory, self._scratch, dirs_exist_ok=True)
        sent = load_file(directory / WEIGHTS)
        kept = {name: tensor for name, tensor in self._old.items() if name.startswith(self._prefix)}
        assert kept.keys() < sent.keys()
        save_file(sent | kept, self._scratch / WEIGHTS, metadata={"format": "pt"})
        self.inner.load_weights(self._scratch, version)


@served_by(HEALTHY)
def test_a_layer_that_does_not_arrive_is_named(audit: Audit, server: Server, tmp_path: Path) -> None:
    cause = principal(
        audit(sync=True, wrap=lambda engine: LosesOneLayer(engine, 1, server.model, tmp_path / "sent"))
    )

    assert cause.cause == "weights/partial"
    assert "layer 1" in cause.evidence
    assert "layer 0" not in cause.evidence
    assert "layer 2" not in cause.evidence


@served_by(BF16, BF16_HEAD)
def test_bf16_passes_under_its_own_profile(audit: Audit) -> None:
    record = audit()

    assert_the_same_policy(record)
    assert record.precision == "bf16"


@served_by(BF16)
def test_a_head_in_bf16_is_listed_with_its_share_and_fix(audit: Audit) -> None:
    (head,) = [cause for cause in audit().causes if cause.cause == "path/head-precision"]

    assert not head.gating
    assert 0.0 < head.interval[0] <= head.explained <= head.interval[1] < 1.0
    assert head.fix == """--hf-overrides '{"head_dtype":"float32"}'"""


@served_by(BF16_HEAD)
def test_with_that_fix_it_is_gone(audit: Audit) -> None:
    record = audit()

    assert "path/head-precision" not in {cause.cause for cause in record.causes}
    (probe,) = [probe for probe in record.probes if probe.name == "head-precision"]
    assert "the head is not rounded" in probe.message


def is_typed(fix: str, setup: Setup) -> bool:
    """Whether the server was started with this on its command line."""
    return f" {fix} " in f" {' '.join(flags(setup.config.engine, setup.config.model.dtype))} "
