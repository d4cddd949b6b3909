"""Rollouts with the trainer's own bits.

    engine = Engine("testbed:qwen3")
    outputs = engine.generate(["3+4="], SamplingParams(temperature=0.7, max_tokens=64, seed=1))

A step is plan → run → commit: the scheduler decides without tensors, the runner computes without decisions. What a
request gets does not depend on who runs beside it, on how it is cut into steps, or on what the cache holds.
"""

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from zerodrift import models
from zerodrift.core import require
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import EngineError, InvalidPrompt, InvalidValue, InvariantBroken
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine import consistency
from zerodrift.engine.kv import DEFAULT_BYTES, blocks_in
from zerodrift.engine.limits import KVPolicy, Limits
from zerodrift.engine.metrics import Clock, EngineMetrics, metrics_of
from zerodrift.engine.output import Identity, Output, Piece, output_of, piece_of, refused
from zerodrift.engine.prompts import (
    PromptLike,
    ServedFacts,
    as_prompt,
    as_prompts,
    as_sampling,
    check_request,
)
from zerodrift.engine.runner import Runner
from zerodrift.engine.sample import Phase, Sample
from zerodrift.engine.sampler import LogprobsMode, Sampler
from zerodrift.engine.scheduler import Scheduler
from zerodrift.engine.text import Texts
from zerodrift.engine.weights import exchanged, own_model, version_of
from zerodrift.exact.fingerprint import numeric_fingerprint, stop_ids_of
from zerodrift.exact.paged import PagedKV
from zerodrift.sampler.noise import draw_seed

Choice = TypeVar("Choice", bound=StrEnum)
MAX_NUM_SEQS = 256


class Engine:
    """One model, its KV memory, and the requests in flight. For one thread at a time: a second one is refused."""

    name = "exact"

    def __init__(  # noqa: PLR0913  the settings that users of vLLM's LLM know, by their names
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int = DEFAULT_BYTES,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_waiting: int = 1024,
        enable_prefix_caching: bool = True,
        logprobs_mode: str = "processed_logprobs",
        version: str = "initial",
    ) -> None:
        """`model` is "testbed:NAME", a directory, or a transformers model, of which the engine takes a copy.

        `max_num_seqs` is 256 unless `max_num_batched_tokens` is less: a sequence that runs takes a token per step.
        """
        if max_num_seqs is None:
            max_num_seqs = min(MAX_NUM_SEQS, max_num_batched_tokens)
        self.tokenizer = tokenizer = _tokenizer_of(model, tokenizer)
        model = own_model(model, dtype)
        self.mode = _one_of(LogprobsMode, "logprobs_mode", logprobs_mode)
        context = model.config.max_position_embeddings if max_model_len is None else max_model_len
        require.whole(
            InvalidValue, "max_model_len", context, "it counts tokens of prompt and output, two at least", 2
        )
        self.facts = ServedFacts(context, model.config.vocab_size, tokenizer is not None)
        stop_ids = stop_ids_of(model)
        limits = Limits(
            block_size=block_size,
            num_blocks=1 if num_blocks is None else num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            prefix_caching=enable_prefix_caching,
        )
        if num_blocks is None:
            limits = replace(limits, num_blocks=blocks_in(model, limits, context, kv_cache_memory_bytes))
        self._texts = Texts(tokenizer, stop_ids)
        self.scheduler = Scheduler(limits, version_of(model, version), self._texts.ended)
        self.runner = Runner(
            model, PagedKV(model, limits.num_blocks, block_size), Sampler(self.mode, stop_ids)
        )
        self._identity = self._identify()
        self._unclaimed: list[Output] = []
        self._next_id = 0
        self._clock = Clock()
        self._broken: InvariantBroken | None = None
        self._user = threading.RLock()

    @property
    def version(self) -> WeightVersion:
        """The weights that the next step runs with."""
        return self.scheduler.version

    @property
    def model(self) -> Any:
        """The engine's own prepared model; weights change through `swap_weights` only."""
        return self.runner.model

    @property
    def has_unfinished(self) -> bool:
        """Whether another step would do something, or has outputs to give that came while others were served."""
        return bool(self.scheduler.samples or self._unclaimed)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> list[Output]:
        """One output per sample: in the order of prompts, and of sample indices within one.

        `forced` gives, for each prompt, the first output tokens: they are decoded one by one as if drawn.
        """
        requests = as_prompts(prompts, self.tokenizer)
        params = as_sampling(sampling_params, len(requests))
        given = [()] * len(requests) if forced is None else [tuple(tokens) for tokens in forced]
        if len(given) != len(requests):
            raise InvalidPrompt(
                f"{len(requests)} prompts came with {len(given)} lists of forced tokens; give one each"
            )
        queue = list(zip(requests, params, given, strict=True))[::-1]
        order: dict[str, int] = {}
        outputs: list[Output] = []
        try:
            while queue or any(request_id in order for request_id in self.scheduler.requests):
                while queue and len(self.scheduler.waiting) < self.scheduler.limits.max_waiting:
                    asked, own, tokens = queue.pop()
                    order[request_id := self._new_id()] = len(order)
                    prompt = None
                    try:
                        prompt = as_prompt(asked, self.tokenizer)
                        self.add_request(prompt, own, request_id=request_id, forced=tokens)
                    except (EngineError, InvalidValue) as error:
                        outputs.append(refused(request_id, prompt, own, self._identity, error))
                outputs += self._claim(order.keys())
        finally:
            self._abandon(order.keys())
        return sorted(outputs, key=lambda output: (order[output.request_id], output.sample_index))

    def stream(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """Tokens as they come, of all samples of one prompt. Closing the iterator early aborts the request."""
        request_id = self.add_request(prompt, sampling_params)
        samples = list(self.scheduler.requests[request_id])
        for sample in samples:
            self._texts.watch(sample)
        given = dict.fromkeys(samples, 0)
        try:
            while given:
                if any(sample.phase is not Phase.FINISHED for sample in given):
                    self._claim({request_id})
                for sample in list(given):
                    # Steps of others go on while this one is read: what they added is noted before it is shown.
                    before, given[sample] = given[sample], len(sample.output)
                    output = next(iter(self._outputs([sample])), None)
                    if output is not None:
                        del given[sample]
                    if output is not None or len(sample.output) > before:
                        yield piece_of(sample, before, self._texts, output)
        finally:
            self._unclaimed = [each for each in self._unclaimed if each.request_id != request_id]
            self._abandon({request_id})
            for sample in samples:
                self._texts.drop(sample)

    def add_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        forced: Sequence[int] = (),
    ) -> str:
        """Queue a request, and give back its id. What could never be served raises."""
        prompt = as_prompt(prompt, self.tokenizer)
        (sampling,) = as_sampling(sampling_params, 1)
        check_request(prompt, sampling, forced, self.facts)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=draw_seed())
        require.instance(InvalidValue, "request_id", request_id, str | None)
        with self._in_use():
            request_id = self._new_id() if request_id is None else request_id
            self.scheduler.add(
                Sample(0, request_id, 0, prompt.token_ids, sampling, prompt.cache_salt, tuple(forced))
            )
        return request_id

    def step(self) -> list[Output]:
        """One forward over everything that can run; returns what came to its end."""
        with self._in_use():
            claimed, self._unclaimed = self._unclaimed, []
            return claimed + self._step()

    def abort(self, request_id: str) -> list[Output]:
        """End a request now; its samples come back with the tokens that they have."""
        with self._in_use():
            return self._outputs(self.scheduler.abort(request_id))

    def swap_weights(
        self, state: Mapping[str, torch.Tensor], version: str | WeightVersion, kv: str = "recompute"
    ) -> WeightVersion:
        """From the next step on, the weights of `state`, all of them or, if anything is wrong, none.

        `kv` is "recompute" (exact under the new weights alone) or "keep" (requests in flight go on with the KV that
        they have, and their lineage says so).
        """
        policy = _one_of(KVPolicy, "kv", kv)
        with self._in_use():
            model = exchanged(self.model, state)
            new = version_of(model, version)
            self.runner.model = model
            self.scheduler.swap(new, policy)
            self._identity = self._identify()
        return new

    def reset_cache(self) -> None:
        """Forget every cached prefix that no request in flight looks at."""
        with self._in_use():
            self.scheduler.cache.clear()

    def fingerprint(self) -> EngineFingerprint:
        """Who computes: facts are named as in the other engines' fingerprints."""
        limits = self.scheduler.limits
        return EngineFingerprint(
            engine=self.name,
            semantic={
                "logprobs_mode": self.mode.value,
                "generation_config": "vllm",
                "hf_overrides": "{}",
                "lora": "null",
                "weights": self.version.digest or "unknown",
            },
            numeric=numeric_fingerprint(self.model),
            deployment={
                "max_model_len": str(self.facts.max_model_len),
                "block_size": str(limits.block_size),
                "num_blocks": str(limits.num_blocks),
                "max_num_seqs": str(limits.max_num_seqs),
                "max_num_batched_tokens": str(limits.max_num_batched_tokens),
                "enable_prefix_caching": str(limits.prefix_caching).lower(),
            },
        )

    def metrics(self) -> EngineMetrics:
        """The engine in numbers."""
        return metrics_of(self.scheduler, self._clock, self.runner)

    def check(self) -> None:
        """Stop the engine, with a dump of its books, if they contradict themselves. Runs by itself when idle."""
        try:
            consistency.check(self.scheduler)
        except InvariantBroken as error:
            error.dump = consistency.dump(self.scheduler)
            self._broken = error
            raise

    def _step(self) -> list[Output]:
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan.slices:
            return []
        planned = time.perf_counter()
        try:
            result = self.runner.launch(plan).result()
        except BaseException:
            self.scheduler.discard()
            raise
        self._clock.runs += time.perf_counter() - planned
        outputs = self._outputs(self.scheduler.commit(plan, result))
        self._clock.steps += time.perf_counter() - begin
        if not self.scheduler.samples:
            self.check()
        return outputs

    def _outputs(self, samples: Sequence[Sample]) -> list[Output]:
        return [self._output(sample) for sample in samples if sample.phase is Phase.FINISHED]

    def _output(self, sample: Sample) -> Output:
        text = self._texts.final(sample)
        try:
            return output_of(sample, self._identity, text)
        except (EngineError, InvalidValue) as error:
            # Numbers that no completion may carry, as a forced token that is all but impossible: its request's alone.
            prompt = Prompt(sample.prompt)
            failed = refused(sample.request_id, prompt, sample.sampling, self._identity, error)
            return msgspec.structs.replace(failed, sample_index=sample.sample_index)

    def _claim(self, request_ids: Collection[str]) -> list[Output]:
        """A step, of which others' outputs are put aside for `step` to give."""
        mine: list[Output] = []
        with self._in_use():
            for output in self._step():
                (mine if output.request_id in request_ids else self._unclaimed).append(output)
        return mine

    def _abandon(self, request_ids: Collection[str]) -> None:
        """Whoever asked is gone: nothing is computed for nobody."""
        for request_id in [each for each in self.scheduler.requests if each in request_ids]:
            self.abort(request_id)

    def _new_id(self) -> str:
        """One that no request has, whatever ids a user gave."""
        taken = {*self.scheduler.requests, *(each.request_id for each in self._unclaimed)}
        self._next_id += 1
        while (request_id := f"request-{self._next_id}") in taken:
            self._next_id += 1
        return request_id

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """By one thread, and never again once the books contradicted themselves."""
        if not self._user.acquire(blocking=False):
            raise EngineError("another thread is using this engine; give each thread its own, or take turns")
        try:
            if self._broken is not None:
                raise self._broken
            yield
        except InvariantBroken as error:
            self._broken = error
            raise
        finally:
            self._user.release()

    def _identify(self) -> Identity:
        fingerprint = self.fingerprint()
        return Identity(self.mode.kind, fingerprint.digest, fingerprint.numeric)


def _tokenizer_of(model: Any, tokenizer: Any) -> Any:
    """The one that is given, by itself or by name; else the model's, where the model has a name."""
    named = model if tokenizer is None else tokenizer
    return models.tokenizer(named) if isinstance(named, (str, Path)) else tokenizer


def _one_of(choices: type[Choice], name: str, value: str) -> Choice:
    try:
        return choices(value)
    except ValueError:
        raise InvalidValue(f"{name} is {value!r}; use one of {', '.join(choices)}") from None
