"""A program whose memory is watched: `memory.py measure` or `memory.py audit DIRECTORY PROMPTS TOKENS LENGTH`.

It says JSON: how far its resident memory rose above what it was before, in bytes. In a process of its own, because
what other tests have freed but the allocator still holds would be used again unseen.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zerodrift import models
from zerodrift.audit import measure as measuring
from zerodrift.audit.measure import Observed, measure
from zerodrift.audit.progress import Silent
from zerodrift.audit.session import Session
from zerodrift.backends import teacher as teaching
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.config.engine import EngineConfig
from zerodrift.config.model import ModelConfig
from zerodrift.config.run import RunConfig
from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion, FinishReason, LogprobKind
from zerodrift.core.request import Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion

FEW, MANY = 64, 1600
"""Sequences to measure. The peak of one and the same run varies by 5 MiB: a fifth of what so many sequences keep."""
TOGETHER = 500
"""Sequences that are sampled at once, before the audit begins."""


def small(vocab_size: int, hidden: int) -> Any:
    """One layer: what an audit keeps does not depend on the model, and a larger one only takes longer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # As they come the logits are all but equal, and everything sampled would be noise.
        model.lm_head.weight.mul_(1.5 / (model.lm_head.weight.std() * hidden**0.5))
    return model


def resident(name: str) -> int:
    """VmRSS, or VmHWM: the most that it ever was since it was set back."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def rise(work: Callable[[], object]) -> int:
    """How far memory rises while `work` runs, what it returns included."""
    # What was freed and is still held would be used again unseen: 200 MiB, after the tokens of an audit were sampled.
    ctypes.CDLL(None).malloc_trim(0)
    # 5 sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    kept = work()
    peak = resident("VmHWM")
    del kept
    return peak - before


# --- measuring --------------------------------------------------------------------------------------------------


def observed(vocab_size: int, sequences: int, tokens: int) -> list[Observed]:
    rng = np.random.default_rng(0)
    return [
        Observed(
            completion(rng.integers(2, vocab_size, 16), rng.integers(2, vocab_size, tokens)), SamplingParams()
        )
        for _ in range(sequences)
    ]


def completion(
    prompt: Any, output: Any, logprobs: Any = None, sampling: SamplingParams | None = None
) -> Completion:
    """From arrays, so that every number is an object of its own, as if it came over a wire."""
    return Completion(
        prompt_token_ids=tuple(prompt.tolist()),
        token_ids=tuple(output.tolist()),
        logprobs=(-1.0,) * len(output) if logprobs is None else tuple(logprobs.tolist()),
        kind=LogprobKind.PROCESSED,
        sampling=sampling or SamplingParams(),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(WeightVersion("recorded"), 0, len(output)),),
        fingerprint="recorded",
    )


def of_measuring(vocab_size: int, sequences: int, tokens: int) -> int:
    teacher = Teacher(small(vocab_size, 32), layout=Layout.PADDED, batch=16)
    given = observed(vocab_size, sequences, tokens)
    # Once before: what torch sets up at first use is no part of it.
    measure(teacher, given[:1], ())
    return rise(lambda: measure(teacher, given, ()))


def measured() -> dict[str, int]:
    found = {f"vocabulary of {size}": of_measuring(size, 1, 256) for size in (49_152, 151_936)}
    found |= {f"{count} sequences": of_measuring(512, count, 256) for count in (FEW, MANY)}
    # The negative control: everything at once, as it was.
    measuring.CELLS = teaching.ROWS_BYTES = 2**50
    return {**found, "at once": of_measuring(49_152, 1, 256)}


# --- an audit ---------------------------------------------------------------------------------------------------


class Recorded:
    """Answers the plan with what was sampled before, and all other questions as the reference in fp32 does."""

    def __init__(self, inner: Backend, model: Any, prompts: Sequence[np.ndarray], tokens: int) -> None:
        self.inner = inner
        self.places = {tuple(prompt.tolist()): place for place, prompt in enumerate(prompts)}
        batches = [prompts[begin : begin + TOGETHER] for begin in range(0, len(prompts), TOGETHER)]
        drawn = [draw(model, np.stack(batch), tokens) for batch in batches]
        self.ids, self.logprobs = (np.concatenate(parts) for parts in zip(*drawn, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        if any(request.prompt.token_ids not in self.places for request in requests):
            return self.inner.generate(requests)
        return [Answer((self._completion(request),)) for request in requests]

    def _completion(self, request: Request) -> Completion:
        # A tuple anew, and of new numbers: nothing is shared with the request.
        prompt, place = np.array(request.prompt.token_ids), self.places[request.prompt.token_ids]
        return completion(prompt, self.ids[place], self.logprobs[place].astype(np.float64), request.sampling)


@torch.no_grad()
def draw(model: Any, prompts_BL: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample from the model's own distribution, with a generator that nobody else uses."""
    generator = torch.Generator().manual_seed(int(prompts_BL.sum()))
    ids_BL, cache, ids, logprobs = torch.from_numpy(prompts_BL), None, [], []
    for _ in range(tokens):
        output = model(ids_BL, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logprobs_BV = output.past_key_values, output.logits[:, -1].log_softmax(-1)
        ids_BL = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        ids.append(ids_BL)
        logprobs.append(logprobs_BV.gather(-1, ids_BL))
    return torch.cat(ids, dim=1).to(torch.int32).numpy(), torch.cat(logprobs, dim=1).numpy()


def audited(directory: Path, count: int, tokens: int, length: int) -> dict[str, Any]:
    path = models.materialise("testbed:llama", directory / "model")
    small(512, 64).save_pretrained(path)
    rng = np.random.default_rng(0)
    # All of one length, so that many can be sampled at once without padding.
    prompts = list(rng.integers(4, 512, (count, length)))
    lines = [json.dumps({"prompt": prompt.tolist()}) for prompt in prompts]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recorded = Recorded(
        ReferenceBackend(path, dtype="float32"), models.load(path, dtype="float32"), prompts, tokens
    )
    session = Session(
        config=RunConfig(
            model=ModelConfig(path=str(path), dtype="float32"),
            engine=EngineConfig(name="reference"),
            sampling_defaults=SamplingDefaults(ignore_eos=True),
            validation=ValidationConfig(
                prompts=str(directory / "prompts.jsonl"),
                property_based_prompts=False,
                num_prompts=count,
                equivalence_trials=count,
                max_tokens=tokens,
            ),
        ),
        directory=directory / "run",
        wrap=lambda _: recorded,
    )
    found: dict[str, Any] = {}

    def audit() -> object:
        result = session.run(Silent())
        assert result.table is not None
        found.update(verdict=result.record.verdict, tokens=len(result.table.token))
        return result

    began = time.monotonic()
    return {"rise": rise(audit), "seconds": time.monotonic() - began, **found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "measure":
        told: dict[str, Any] = measured()
    else:
        told = audited(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    os.write(1, json.dumps(told).encode() + b"\n")
