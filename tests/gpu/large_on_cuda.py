"""A healthy vLLM with a model of 8B on a GPU must pass, updates included: verdict, seconds and memory of each audit.

    python tests/gpu/large_on_cuda.py --python PYTHON --out DIR [--small] [--only NAME ...]

Random bf16 weights of the shape of Qwen3-8B, with a gain before the head that makes some tokens likely; a reference in fp32
on the same GPU. One server; the audits are the default ones of `zerodrift audit`. A line of JSON each, and the exit code is 1
where one does not pass, or where an update takes more than MOST_GIB beside the engine. `--small` has two layers.
"""

import argparse
import gc
import json
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from zerodrift import models
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends.vllm_launch import flags, launch_vllm, transfer_flags
from zerodrift.config.load import load
from zerodrift.core.errors import ZerodriftError
from zerodrift.models.testbed_config import BOS_ID, EOS_ID
from zerodrift.records.verdict import Outcome

BASE = (
    "engine.name=vllm",
    "engine.logprobs_mode=processed_logprobs",
    "engine.generation_config=vllm",
    "engine.enable_prefix_caching=true",
    "engine.async_scheduling=null",
    "engine.enforce_eager=true",
    "engine.max_model_len=1024",
    "engine.gpu_memory_utilization=0.35",
    "model.dtype=bfloat16",
)
MOST_GIB = 60.0
"""Of the audit's own process, while an update is pushed: what a card of 80 leaves beside an engine in 16."""
GAIN = 3.0
"""Of the last norm: with 1 every token of 151,936 is about as likely as any other, and rounding shows in nothing."""


class Asked(NamedTuple):
    """One audit."""

    name: str
    changes: tuple[str, ...] = ()
    sync: bool = False


AUDITS = (
    Asked("default"),
    Asked("cool", ("sampling_defaults.temperature=0.7",)),
    Asked("seed 1", ("validation.seed=1",)),
    Asked("update", sync=True),
    Asked("update, seed 1", ("validation.seed=1",), sync=True),
)


def write(directory: Path, *, small: bool) -> Path:
    """A checkpoint of the shape of Qwen3-8B, under the tokenizer of a built-in model."""
    models.materialise("testbed:qwen3", directory)
    (directory / "model.safetensors").unlink()
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=2 if small else 36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        model.model.norm.weight.fill_(GAIN)
    model.save_pretrained(directory)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return directory


def audit(asked: Asked, where: tuple[str, ...], directory: Path) -> dict[str, object]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    session = Session(
        config=load(None, (*BASE, *asked.changes, *where)), directory=directory, sync=asked.sync
    )
    record = session.run(Silent()).record
    shutil.rmtree(directory / "sync", ignore_errors=True)  # 16 GiB each
    return {
        "audit": asked.name,
        "verdict": record.verdict.value,
        "seconds": round(time.monotonic() - began, 1),
        "GiB": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "causes": [f"{cause.cause}{' (gating)' * cause.gating}: {cause.evidence}" for cause in record.causes],
        "probes": {
            probe.name: f"{probe.status.value} {probe.seconds:.1f} s: {probe.message}"
            for probe in record.probes
        },
        "metrics": record.metrics,
        "floor": record.floor,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--small", action="store_true", help="two layers, to look at the script itself")
    parser.add_argument("--only", action="append", default=[], choices=[asked.name for asked in AUDITS])
    given = parser.parse_args()
    model = write(given.out / "model", small=given.small)
    config = load(None, BASE)
    env = dict(pair.split("=", 1) for pair in given.env)
    arguments = [*flags(config.engine, config.model.dtype), *transfer_flags(given.python, env)]
    missed, began = 0, time.monotonic()
    with launch_vllm(given.python, model, arguments, env, given.out / "server.log", timeout_s=400) as server:
        print(json.dumps({"start s": round(time.monotonic() - began, 1)}), flush=True)  # noqa: T201 - the result
        where = (
            f"engine.url={server.url}",
            f"model.path={model}",
            "validation.reference_device=cuda",
        )
        for asked in AUDITS:
            if given.only and asked.name not in given.only:
                continue
            try:
                told = audit(asked, where, given.out / asked.name.replace(", ", "-").replace(" ", "-"))
                right = told["verdict"] == Outcome.PASS.value
                missed += not right or (asked.sync and torch.cuda.max_memory_reserved() > MOST_GIB * 2**30)
            except ZerodriftError as error:
                told = {"audit": asked.name, "error": str(error)[-3000:]}
                missed += 1
            print(json.dumps(told), flush=True)  # noqa: T201 - the result
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
