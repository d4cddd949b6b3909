"""Our plugin in real vLLM servers: weights out of a directory by vLLM's own protocol, and no half of an update.

The servers are started as `--engine vllm` starts them: the plugin is found in their environment, and turned on.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.backends.vllm import VllmBackend
from zerodrift.config.load import load
from zerodrift.core.completion import Completion
from zerodrift.core.errors import EngineError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.models.directory import WEIGHTS

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "vllm.yaml"
RELEASES = (pytest.param("vllm-0.28.0", marks=pytest.mark.long), "vllm-0.32.0")
LAYER = "model.layers.1."
DOWN = f"{LAYER}mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A, and what may come after it: B moves layers 0 and 1, the others are no whole update of A."""
    root = tmp_path_factory.mktemp("checkpoints")
    a = load_file(models.materialise("testbed:qwen3", root / "A") / WEIGHTS)
    moved = {
        name: tensor * 1.05 if ".layers.0." in name or ".layers.1." in name else tensor
        for name, tensor in a.items()
    }
    others = {
        "B": moved,
        "lost": {name: tensor for name, tensor in moved.items() if name != DOWN},
        "foreign": moved | {"model.layers.1.mlp.router.weight": a[DOWN]},
        "cut": moved | {DOWN: a[DOWN][:-1].contiguous()},
    }
    for name, tensors in others.items():
        models.materialise("testbed:qwen3", root / name)
        (root / name / WEIGHTS).unlink()
        save_file(tensors, root / name / WEIGHTS, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module", params=RELEASES)
def backend(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmBackend]:
    python = ROOT / ".engines" / request.param / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{request.param} is not installed: engines/install {request.param}")
    engine = load(CONFIG, (f"engine.python={python}", "engine.env={OMP_NUM_THREADS: '1'}")).engine
    log = tmp_path_factory.mktemp("log")
    with (
        contextlib.chdir(ROOT),
        open_engine(engine, ServedModel(str(checkpoints / "A"), "float32"), log) as backend,
    ):
        assert isinstance(backend, VllmBackend)
        yield backend


@pytest.fixture(autouse=True)
def at_a(backend: VllmBackend, checkpoints: Path) -> None:
    backend.load_weights(checkpoints / "A", WeightVersion("A"))
    backend.reset_cache()


def ask(backend: VllmBackend) -> Completion:
    prompt = Prompt(tuple(range(4, 40)))
    [answer] = backend.generate([Request(prompt, SamplingParams(max_tokens=8, temperature=0.0))])
    return answer.completions[0]


def label(backend: VllmBackend) -> str:
    return ask(backend).versions[0].version.label


def send(backend: VllmBackend, *updates: dict[str, object], version: str = "sent") -> None:
    backend._http.post("/start_weight_update", None)
    for update in updates:
        backend._http.post("/update_weights", {"update_info": update})
    backend._http.post("/finish_weight_update", {"weight_version": version})


def names_in(directory: Path, prefix: str) -> list[str]:
    return [name for name in load_file(directory / WEIGHTS) if name.startswith(prefix)]


def test_the_transfer_engine_is_found_and_used(backend: VllmBackend) -> None:
    assert backend.update_path.by_transfer
    assert backend.fingerprint().deployment["weight_transfer"] == "zerodrift"
    assert Capability.LOAD_WEIGHTS in backend.capabilities
    assert label(backend) == "A"


def test_an_update_gives_the_bits_of_reload_weights_and_its_label(
    backend: VllmBackend, checkpoints: Path
) -> None:
    before = ask(backend)
    backend.load_weights(checkpoints / "B", WeightVersion("B"))
    backend.reset_cache()
    after = ask(backend)
    by_reload = backend.update_path._replace(by_transfer=False)
    by_reload.push(backend._http, checkpoints / "A", WeightVersion("A"))
    by_reload.push(backend._http, checkpoints / "B", WeightVersion("B again"))
    backend.reset_cache()
    reloaded = ask(backend)

    assert after.versions[0].version.label == "B"
    assert after.logprobs != before.logprobs
    assert (reloaded.token_ids, reloaded.logprobs) == (after.token_ids, after.logprobs)
    backend.load_weights(checkpoints / "A", WeightVersion("A"))
    backend.reset_cache()
    assert ask(backend).logprobs == before.logprobs


def test_layers_may_come_one_by_one(backend: VllmBackend, checkpoints: Path) -> None:
    """B differs from A in two layers: both of them are B."""
    b = str(checkpoints / "B")
    parts = [names_in(checkpoints / "B", f"model.layers.{number}.") for number in (0, 1)]
    send(backend, *({"directory": b, "names": names} for names in parts), version="by layers")
    backend.reset_cache()
    by_layers = ask(backend)
    backend.load_weights(checkpoints / "B", WeightVersion("B"))
    backend.reset_cache()

    assert by_layers.versions[0].version.label == "by layers"
    assert ask(backend).logprobs == by_layers.logprobs


# vLLM takes paths out of what it answers; its log has them.
@pytest.mark.parametrize(
    ("directory", "names", "why"),
    [
        ("nowhere", None, "is no directory"),
        ("lost", None, "missing in <path>; .*down_proj"),
        ("foreign", None, "not in the model that is served: model.layers.1.mlp.router.weight"),
        ("cut", None, f"of another shape in the model: {DOWN}"),
        ("lost", [DOWN], "not in <path>: .*down_proj"),
        ("B", ["no.such.tensor"], "not in <path>: no.such.tensor"),
        ("B", [], "no tensors"),
    ],
)
def test_what_is_no_update_is_refused_and_changes_nothing(
    backend: VllmBackend, checkpoints: Path, directory: str, names: list[str] | None, why: str
) -> None:
    before = ask(backend)
    with pytest.raises(EngineError, match=why):
        send(backend, {"directory": str(checkpoints / directory), "names": names})
    backend.reset_cache()
    after = ask(backend)
    assert (after.logprobs, after.versions[0].version.label) == (before.logprobs, "A")


def test_pieces_of_a_layer_are_not_applied_and_the_rest_may_follow(
    backend: VllmBackend, checkpoints: Path
) -> None:
    """vLLM would fuse what came with uninitialised memory."""
    before, b = ask(backend), str(checkpoints / "B")
    with pytest.raises(EngineError, match=f"missing, while others of {LAYER[:-1]} were sent"):
        send(backend, {"directory": b, "names": [DOWN]})
    backend.reset_cache()
    assert ask(backend).logprobs == before.logprobs
    assert label(backend) == "A"

    rest = [name for name in names_in(checkpoints / "B", LAYER) if name != DOWN]
    backend._http.post("/update_weights", {"update_info": {"directory": b, "names": rest}})
    backend._http.post("/finish_weight_update", {"weight_version": "whole"})
    assert label(backend) == "whole"


def test_an_empty_update_gets_no_label(backend: VllmBackend, checkpoints: Path) -> None:
    with pytest.raises(EngineError, match="nothing was sent"):
        send(backend, version="empty")
    assert label(backend) == "A"
    # The update is still open, and can be finished.
    backend._http.post("/update_weights", {"update_info": {"directory": str(checkpoints / "A")}})
    backend._http.post("/finish_weight_update", {"weight_version": "A"})


def test_unknown_words_are_refused(backend: VllmBackend) -> None:
    with pytest.raises(EngineError, match="Invalid update_info"):
        send(backend, {"directory": "x", "device": "cuda"})
    with pytest.raises(EngineError, match="Invalid init_info"):
        backend._http.post("/init_weight_transfer_engine", {"init_info": {"port": 1}})


TRAINER = """
import sys
import torch
from transformers import AutoModelForCausalLM
import zerodrift_vllm
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

url, exchange, checkpoint = sys.argv[1:]
zerodrift_vllm.register()
from zerodrift_vllm.trainer import DirectoryTrainerInitInfo

model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
info, client = DirectoryTrainerInitInfo(exchange, rank=0), HTTPVLLMWeightSyncClient(url)
sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
sender.send_weights("by the factory")
"""


@pytest.mark.long
def test_vllms_own_trainer_factory_sends(
    backend: VllmBackend, checkpoints: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a process of its own, with vLLM's client and source: what arrives is B, bit for bit."""
    release = request.node.callspec.params["backend"]
    if release != "vllm-0.32.0":
        pytest.skip("earlier releases have another trainer's side")
    python = ROOT / ".engines" / release / "bin" / "python"
    plugin = ROOT / "integrations" / "vllm_plugin" / "src"
    environment = {**os.environ, "PYTHONPATH": str(plugin), "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(
        [python, "-c", TRAINER, backend._http.address, tmp_path, checkpoints / "B"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    backend.reset_cache()
    sent = ask(backend)
    assert sent.versions[0].version.label == "by the factory"
    backend.load_weights(checkpoints / "B", WeightVersion("B"))
    backend.reset_cache()
    assert ask(backend).logprobs == sent.logprobs
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_breaks_off_is_not_a_success(backend: VllmBackend, checkpoints: Path) -> None:
    """Last in the file: the server does not survive it, and must not. A shape is wrong here, and init hides that."""
    cut = str(checkpoints / "cut")
    backend._http.post("/init_weight_transfer_engine", {"init_info": {"checkpoint": cut}})
    with pytest.raises(EngineError, match="/finish_weight_update failed"):
        send(backend, {"directory": cut}, version="torn")
    assert backend._http.get("/weight_info") == {"weight_version": "A"}
    with pytest.raises(EngineError, match="neither the old nor the new one; restart the server"):
        backend._http.post("/finish_weight_update", {"weight_version": "torn"})
    with pytest.raises(EngineError):
        backend.load_weights(checkpoints / "A", WeightVersion("A"))
    # Not one token of a mixture.
    with pytest.raises(EngineError):
        ask(backend)
