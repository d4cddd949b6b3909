"""Vanilla `transformers` as an engine: the slowest one, and the one the others are measured against."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from zerodrift import models
from zerodrift.backends.base import Capability, OwnTokenizer, need
from zerodrift.backends.generation import Sampled, sample
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.config.model import Device
from zerodrift.core.completion import (
    Answer,
    Completion,
    EngineFingerprint,
    LogprobKind,
    TokenAlternative,
)
from zerodrift.core.errors import InvalidPrompt, ModelError
from zerodrift.core.request import Request
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.models.family.abilities import computes_in_fp64, require_causal
from zerodrift.models.family.registry import FAMILIES
from zerodrift.models.loading import AS_SAVED, DTYPES, dtype_of
from zerodrift.models.placing import check_device, place
from zerodrift.weights.digest import fits, model_digest

TINY_PARAMETERS = 20_000_000
"""Models below this run in fp64: a testbed forward costs milliseconds either way."""


class ReferenceBackend(OwnTokenizer):
    """Generates and scores with an untouched transformers model, one batch at a time."""

    name = "reference"
    capabilities = frozenset(
        {
            Capability.TOP_LOGPROBS,
            Capability.SCORE,
            Capability.SEED,
            Capability.TOKENIZE,
            Capability.LOAD_WEIGHTS,
            Capability.WEIGHT_VERSION,
            Capability.EFFECTIVE_CONFIG,
        }
    )

    def __init__(
        self,
        spec: str | Path,
        *,
        dtype: str | None = None,
        kind: LogprobKind = LogprobKind.PROCESSED,
        batch: int = 16,
        device: Device = "cpu",
        tokenizer: Any = None,
    ) -> None:
        """`spec` as in `models.load`; `dtype` None takes fp64 for tiny models and fp32 for others.

        `tokenizer` None takes the model's own.
        """
        self.device = device
        self.spec = spec
        self.facts = models.facts(spec)
        self.tokenizer = self.own_tokenizer = tokenizer or models.tokenizer(spec)
        self.model, digest, self.saved_dtype = load_reference(spec, dtype, device)
        # Of the checkpoint, not of the model that runs: a planted fault may wrap modules of the latter.
        self._shapes = _shapes(self.model)
        self.kind = kind
        self.batch = batch
        self.max_model_len = self.facts.context_length
        self.version = WeightVersion("initial", digest)
        self.teacher = Teacher(self.model, layout=Layout.PADDED, batch=batch)

    def fingerprint(self) -> EngineFingerprint:
        """Settings are what the model object says, not what was asked for.

        Named, and where they mean the same also worded, as vLLM's (see vllm_facts): a fact is compared with the
        fact of the same name, so raw_logprobs here beside processed_logprobs there must not hide under two names.
        """
        return EngineFingerprint(
            engine=self.name,
            semantic={
                "logprobs_mode": f"{self.kind.value}_logprobs",
                # vLLM's word for: no sampling default comes from the checkpoint's generation_config.json.
                "generation_config": "vllm",
                "hf_overrides": "{}",
                "lora": "null",
                "weights": self.version.digest or "unknown",
            },
            numeric={
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "quantization": "null",
                "kv_cache_dtype": "auto",
                "attention_backend": self.teacher.attention,
                "enable_prefix_caching": "false",
                "enable_chunked_prefill": "false",
                "speculative": "null",
                "tensor_parallel_size": "1",
                "device": self.model.device.type,
                "threads": str(torch.get_num_threads()),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                "isa": torch.backends.cpu.get_cpu_capability(),
            },
            deployment={"max_model_len": str(self.max_model_len), "machine": platform.machine()},
        )

    def has_weights(self, digest: str, dtype: str) -> bool:
        """Whether `digest` is of these very values, held in `dtype` by an engine that widened them on loading."""
        if digest == self.version.digest:
            return True
        if dtype not in DTYPES or digest != model_digest(self.model, dtype_of(dtype)):
            return False
        # An engine that narrowed them has other values.
        return fits(self.model, dtype_of(dtype))

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Requests are cut into batches of `batch` rows; a row is one sample of one request."""
        for request in requests:
            request.prompt.check_vocabulary(self.facts.vocab_size)
            request.sampling.check_vocabulary(self.facts.vocab_size)
        sampled = sample(
            self.model,
            requests,
            eos_ids=self.facts.eos_token_ids,
            max_len=self.max_model_len,
            batch=self.batch,
            decode=self.tokenizer.decode,
        )
        answers, begin = [], 0
        for request in requests:
            rows = sampled[begin : begin + request.sampling.n]
            answers.append(Answer(tuple(self._completion(request, row) for row in rows)))
            begin += request.sampling.n
        return answers

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """It does not: nothing stands between its tokens and an answer that could lose some."""
        need(self, Capability.STREAM, "it answers whole; the exact engine streams (--engine exact)")
        raise AssertionError("the reference does not claim to stream")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-forced, in a padded batch. What is longer than the context was never seen in training."""
        for ids in sequences:
            if len(ids) > self.max_model_len:
                raise InvalidPrompt(
                    f"a sequence of {len(ids)} tokens exceeds the context of {self.max_model_len}; shorten it"
                )
        return self.teacher.score(sequences)

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """All tensors or none: the new model is complete before the old one is let go."""
        model, digest, _ = load_reference(
            directory, str(self.model.dtype).removeprefix("torch."), self.device
        )
        if differing := sorted(_shapes(model).items() ^ self._shapes.items()):
            raise ModelError(
                f"{directory} holds another model than the one that runs: {differing[0][0]} and others are not in both "
                "or differ in shape; give a checkpoint of the same model"
            )
        self.model = model
        self.teacher = Teacher(self.model, layout=Layout.PADDED, batch=self.batch)
        self.version = WeightVersion(version.label, digest)

    def reset_cache(self) -> None:
        """There is no prefix cache."""

    def close(self) -> None:
        """Nothing is held beyond the model itself."""

    def _completion(self, request: Request, row: Sampled) -> Completion:
        assert row.finished is not None, "a sample was read before it ended"
        prompt = request.prompt.token_ids
        raw = self.kind is LogprobKind.RAW
        total = len(prompt) + len(row.token_ids)
        return Completion(
            prompt_token_ids=prompt,
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.raw_logprobs if raw else row.logprobs),
            kind=self.kind,
            sampling=row.sampling,
            finish_reason=row.finished,
            versions=(VersionSpan(self.version, 0, len(row.token_ids)),),
            fingerprint=self.fingerprint().digest,
            sample_index=row.sample_index,
            lineage=(LineageSegment(self.version, 0, total - 1),),
            top_logprobs=tuple(
                tuple(TokenAlternative(token, value) for token, value in alternatives)
                for alternatives in (row.raw_alternatives if raw else row.alternatives)
            ),
            prompt_logprobs=self._prompt_logprobs(request),
            text=self.tokenizer.decode(row.token_ids),
        )

    def _prompt_logprobs(self, request: Request) -> tuple[float | None, ...]:
        prompt = request.prompt.token_ids
        if request.sampling.prompt_logprobs is None:
            return ()
        return (None, *(self.score([prompt])[0] if len(prompt) > 1 else ()))


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class Loaded(NamedTuple):
    """A model, and the digest of the checkpoint that it was loaded from."""

    model: Any
    digest: str
    """In the checkpoint's own dtype: the same whatever the model computes in."""
    saved: torch.dtype
    """That dtype; fp32 of weights that are saved in less than 16 bits, or in fp64."""


def load_reference(spec: str | Path, dtype: str | None = None, device: Device = "cpu") -> Loaded:
    """The model in `dtype`; None is fp64 where that is cheap and the model computes in it, and fp32 elsewhere."""
    check_device(device)
    model = models.load(spec, dtype=AS_SAVED)
    digest = model_digest(model)
    saved = model.dtype if model.dtype in (torch.bfloat16, torch.float16) else torch.float32
    # After the digest: RWKV rescales its weights in its first forward.
    if model.config.model_type not in FAMILIES:
        require_causal(model)
    tiny = sum(p.numel() for p in model.parameters()) < TINY_PARAMETERS
    wanted = dtype or ("float64" if tiny and computes_in_fp64(model) else "float32")
    if torch.promote_types(model.dtype, dtype_of(wanted)) is dtype_of(wanted):
        return Loaded(place(model.to(dtype_of(wanted)), device), digest, saved)
    # Narrower than saved: loaded anew, because `.to` would also narrow the rotary frequencies, which stay in fp32.
    return Loaded(place(models.load(spec, dtype=wanted), device), digest, saved)
