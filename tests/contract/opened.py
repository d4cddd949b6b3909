"""Every backend, opened: in this process, on a peer server, on a real engine. One at a time, for as long as it is used.

`OPENERS` is what the suite over every backend runs through; the tests of one real engine start it by the same code.
"""

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import sglang_peer

from zerodrift import models
from zerodrift.backends.base import Backend
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.launch import LaunchedServer
from zerodrift.backends.llama_cpp import LlamaCppBackend
from zerodrift.backends.llama_cpp_launch import launch_llama_cpp, settings
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.sglang import SglangBackend
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import launch_vllm, route_flags
from zerodrift.config.engine import EngineConfig
from zerodrift.config.load import load
from zerodrift.core.request import Prompt
from zerodrift.models.smollm2 import COMPLETE, gguf_path

ROOT = Path(__file__).parents[2]
MODEL = "testbed:qwen3"
SECRET = "sk-no-fingerprint-shows-this"
"""The key that every server is sent, and that none of them asks for."""

RELEASES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("vllm_releases.toml").read_text())
ASKED = [os.environ["ZERODRIFT_TEST_ENGINE"]] if "ZERODRIFT_TEST_ENGINE" in os.environ else list(RELEASES)
"""ZERODRIFT_TEST_ENGINE leaves one release of vLLM."""
MARKS = {
    release: (pytest.mark.engines, *(() if release == ASKED[-1] else (pytest.mark.long,)))
    for release in ASKED
}
"""The newest release is asked before every change, older ones in `make long`."""
GENERATES = {f"{release}-generate": release for release in ASKED if RELEASES[release]["generates"]}
"""Those that are asked by their route for ids in and ids out as well."""
STARTUP_S = 600.0
"""Half a minute on an idle machine; this is for one that is not."""

LLAMA_CPP_PYTHON = ROOT / (load(ROOT / "docs" / "llama-cpp.yaml", ()).engine.python or "")
SMOLLM2 = ROOT / ".cache" / "smollm2"


@dataclass(frozen=True)
class Subject:
    """A backend, and what must be known of it to hold it to its promises."""

    backend: Backend
    connect: Callable[[], Backend]
    """Another one, of the same engine."""
    model: str | Path
    """Whose tokenizer makes its prompts."""
    precision: float
    """How far a logprob may be from the score of the same token."""
    unknown_id: int
    """A token that its model does not have."""

    def prompt(self, text: str) -> Prompt:
        """Ids with the text that they come from: some engines take nothing else."""
        return Prompt(tuple(models.tokenizer(self.model)(text)["input_ids"]), text)


class Checkpoints(NamedTuple):
    """Directories for `load_weights`."""

    same: Path
    """The weights of MODEL."""
    changed: Path
    """Others of the same model."""
    narrow: Path
    """Of a model with the same tensors in other shapes."""


def write_checkpoints(root: Path) -> Checkpoints:
    paths = Checkpoints(*(models.materialise(MODEL, root / name) for name in Checkpoints._fields))
    changed = models.load(MODEL)
    changed.model.layers[0].mlp.up_proj.weight.data *= 1.5
    changed.save_pretrained(paths.changed)
    config = type(changed.config).from_dict(changed.config.to_dict())
    config.intermediate_size //= 2
    type(changed)(config).save_pretrained(paths.narrow)
    return paths


# In this process


@contextlib.contextmanager
def _in_process(connect: Callable[[], Backend], precision: float) -> Iterator[Subject]:
    with contextlib.closing(connect()) as backend:
        yield Subject(backend, connect, MODEL, precision, models.facts(MODEL).vocab_size)


def reference(folder: Path) -> AbstractContextManager[Subject]:
    return _in_process(partial(ReferenceBackend, MODEL), precision=1e-9)


def exact(folder: Path) -> AbstractContextManager[Subject]:
    config = EngineConfig(name="exact", enable_prefix_caching=True, block_size=8)
    return _in_process(partial(ExactBackend, MODEL, config=config), precision=0.0)


# Peers


@contextlib.contextmanager
def _peer(serve: AbstractContextManager[str], connect: Callable[..., Backend]) -> Iterator[Subject]:
    with serve as url, _in_process(partial(connect, url, api_key=SECRET), precision=2e-5) as subject:
        yield subject


def sglang(folder: Path) -> AbstractContextManager[Subject]:
    return _peer(sglang_peer.serve(MODEL, deterministic=True), SglangBackend)


# Real engines


def vllm_python(release: str) -> Path:
    """The interpreter of an installed release; a test that needs another is skipped."""
    assert release in RELEASES, f"which answers of {release} differ? write it into vllm_releases.toml"
    python = ROOT / ".engines" / release / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{release} is not installed: engines/install {release}")
    return python


@contextlib.contextmanager
def vllm_server(release: str, model: Path, log: Path, *own: str, **env: str) -> Iterator[LaunchedServer]:
    flags = "--dtype float32 --enforce-eager --max-model-len 1024 --served-model-name tiny "
    flags += "--enable-prompt-tokens-details --logprobs-mode processed_logprobs"
    # Without splitting, CPU attention sums in one order: prefill and decode then agree to the last bit.
    env |= {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
    python = vllm_python(release)
    with (
        contextlib.chdir(ROOT),
        launch_vllm(python, model, [*flags.split(), *own], env, log, STARTUP_S) as server,
    ):
        yield server


RUNNING = contextlib.ExitStack()
"""Servers that share_vllm has started; who uses them closes it."""
_STARTED: dict[str, str] = {}


def share_vllm(release: str, folder: Path) -> str:
    """Where a server answers by every route: half a minute to start, so that there is one for each release."""
    if release not in _STARTED:
        model = models.materialise(MODEL, folder / "model")
        opening = route_flags(EngineConfig(name="vllm", route="generate", python=str(vllm_python(release))))
        forked = str(ROOT / "tests" / "engines" / "forking")
        starting = vllm_server(release, model, folder / "log", *opening, PYTHONPATH=forked)
        server = RUNNING.enter_context(starting)
        RUNNING.callback(_STARTED.pop, release)
        _STARTED[release] = server.url
    return _STARTED[release]


@contextlib.contextmanager
def vllm(
    release: str, folder: Path, route: Literal["completions", "generate"] = "completions"
) -> Iterator[Subject]:
    url = share_vllm(release, folder)
    connect = partial(VllmBackend, url, route=route, explicit=True, api_key=SECRET, timeout_s=120)
    with contextlib.closing(connect()) as backend:
        # The first that the model does not have is asked for by test_vllm_real.py: one of the releases dies of it.
        yield Subject(backend, connect, MODEL, precision=0.0, unknown_id=600)


def llama_cpp_model() -> Path:
    """The file that llama.cpp serves; a test of a machine without one is skipped."""
    engine = LLAMA_CPP_PYTHON.parents[1].name
    if not LLAMA_CPP_PYTHON.exists():
        pytest.skip(f"{engine} is not installed: engines/install {engine}")
    if not (SMOLLM2 / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2` (93 MB download)")
    return gguf_path(SMOLLM2)


def llama_cpp_server(model: Path, log: Path, **fields: Any) -> LaunchedServer:
    config = EngineConfig(name="llama-cpp", max_model_len=256, **fields)
    return launch_llama_cpp(LLAMA_CPP_PYTHON, model, settings(config, "auto"), {}, log)


@contextlib.contextmanager
def llama_cpp(folder: Path) -> Iterator[Subject]:
    with llama_cpp_server(llama_cpp_model(), folder / "log", enable_prefix_caching=True) as server:
        connect = partial(LlamaCppBackend, server.url, api_key=SECRET, timeout_s=120)
        with contextlib.closing(connect()) as backend:
            # It scores nothing, so nothing is compared.
            vocabulary = models.facts(SMOLLM2).vocab_size
            yield Subject(backend, connect, SMOLLM2, precision=0.0, unknown_id=vocabulary)


OPENERS: dict[str, Callable[[Path], AbstractContextManager[Subject]]] = {
    "reference": reference,
    "exact": exact,
    "sglang": sglang,
    **{release: partial(vllm, release) for release in ASKED},
    **{name: partial(vllm, release, route="generate") for name, release in GENERATES.items()},
    "llama-cpp": llama_cpp,
}
REAL = {
    **MARKS,
    **{name: MARKS[release] for name, release in GENERATES.items()},
    "llama-cpp": (pytest.mark.engines, pytest.mark.smollm2),
}
"""What a test of them is marked with."""
