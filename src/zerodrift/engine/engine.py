"""Rollouts with the trainer's own bits.

    engine = Engine("testbed:qwen3")
    outputs = engine.generate(["3+4="], SamplingParams(temperature=0.7, max_tokens=64, seed=1))

A step is plan → run → commit: the scheduler decides without tensors, the runner computes without decisions. What a
request gets does not depend on who runs beside it, on how it is cut into steps, or on what the cache holds.
"""

import itertools
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch

from zerodrift.core import require
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import BitsDiffer, EngineError, InvalidValue, InvariantBroken, ZerodriftError
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import AdapterVersion, WeightVersion
from zerodrift.engine import consistency
from zerodrift.engine.adapters import Adapters, AdapterSource
from zerodrift.engine.ahead import Steps
from zerodrift.engine.decode_graph import can_capture
from zerodrift.engine.identity import Identity, fingerprint_of
from zerodrift.engine.kv import DEFAULT_BYTES, blocks_in
from zerodrift.engine.limits import default_limits, swap_policy
from zerodrift.engine.metrics import Clock, EngineMetrics, metrics_of
from zerodrift.engine.output import (
    OnError,
    Output,
    SampleUpdate,
    output_of,
    refused,
    require_served,
    update_of,
)
from zerodrift.engine.prompts import (
    CheckedRequest,
    PromptLike,
    ServedFacts,
    as_prompt,
    as_requests,
    as_sampling,
    check_context,
    check_request,
    tokenizer_of,
)
from zerodrift.engine.reader import SoleReader
from zerodrift.engine.runner import Runner
from zerodrift.engine.sample import Phase, Sample
from zerodrift.engine.sampler import LogprobsMode, Sampler
from zerodrift.engine.scheduler import Scheduler
from zerodrift.engine.spot_check import SpotCheck
from zerodrift.engine.text import Texts
from zerodrift.engine.weights import StagedWeights, copy_running, own_model, stage, version_of
from zerodrift.exact.fingerprint import stop_ids_of
from zerodrift.exact.lora import LoraAdapter, applied
from zerodrift.exact.paged import PagedKV
from zerodrift.sampler.noise import draw_seed
from zerodrift.weights.digest import checkpoint_state


class Engine:
    """One model, its KV memory, and the requests in flight. For one thread at a time: a second one is refused.

    Many threads share one through `EngineLoop`. `metrics()`, `fingerprint()` and `version` may be read by any.
    """

    name = "exact"
    broken: ZerodriftError | None
    """Why it stopped itself: from then on every call raises this."""
    _metrics: EngineMetrics

    def __init__(  # noqa: PLR0913  the settings that users of vLLM's LLM know, by their names
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int = DEFAULT_BYTES,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_waiting: int = 1024,
        decode_rounds: int | None = None,
        enable_prefix_caching: bool = True,
        logprobs_mode: str = "processed_logprobs",
        logprob_check_interval: int | None = None,
        version: str = "initial",
    ) -> None:
        """`model` is "testbed:NAME", a directory, or a transformers model, of which the engine takes a copy.

        `max_num_seqs` is 256 unless `max_num_batched_tokens` is less: a sequence that runs takes a token per step.
        `block_size` is 16, on a GPU 64. While nothing else is to be done, sequences that ask for a temperature alone
        decode `decode_rounds` tokens per step: 1, on a GPU 8.
        One in `logprob_check_interval` (64, on a GPU 512) finished samples is scored again by the trainer's path; 0: none.
        """
        self.tokenizer = tokenizer_of(model, tokenizer)
        model = own_model(model, dtype)
        self.mode = require.one_of(LogprobsMode, "logprobs_mode", logprobs_mode)
        context = model.config.max_position_embeddings if max_model_len is None else max_model_len
        check_context(context, model.config)
        self.facts = ServedFacts(context, model.config.vocab_size, self.tokenizer is not None)
        stop_ids = stop_ids_of(model)
        limits = default_limits(
            on_gpu=can_capture(model),
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            decode_rounds=decode_rounds,
            prefix_caching=enable_prefix_caching,
        )
        if num_blocks is None:
            limits = replace(limits, num_blocks=blocks_in(model, limits, context, kv_cache_memory_bytes))
        self._texts = Texts(self.tokenizer, stop_ids)
        kv, sampler = PagedKV(model, limits.num_blocks, limits.block_size), Sampler(self.mode, stop_ids)
        first = version_of(checkpoint_state(model), version)
        self.scheduler = Scheduler(limits, first, self._texts.ended, sampler.runs_ahead)
        self.runner = Runner(model, kv, sampler)
        self.adapters = Adapters(self.runner, self.scheduler)
        self._steps = Steps(self.scheduler, self.runner)
        self._spot_check = SpotCheck(logprob_check_interval, limits.block_size, model.device.type)
        self._numbers, self._clock, self._user = itertools.count(1), Clock(), threading.RLock()
        self.broken, self._reader = None, SoleReader()
        self._identify()
        self._publish()

    @property
    def version(self) -> WeightVersion:
        """The weights that the next step runs with."""
        return self.scheduler.version

    @property
    def model(self) -> Any:
        """The engine's own prepared model. `swap_weights` writes into its tensors: hold on to `retain_weights`, not to them."""
        return self.runner.model

    @property
    def has_unfinished(self) -> bool:
        """Whether another step would do something."""
        return bool(self.scheduler.samples)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        forced: Sequence[Sequence[int]] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        on_error: str = "raise",
    ) -> list[Output]:
        """One output per sample: in the order of prompts, and of sample indices within one.

        `forced` gives, for each prompt, the first output tokens: they are decoded one by one as if drawn. `lora` names
        an adapter that is loaded, for all or for each; None is the base.
        What cannot be served raises, before anything runs where that can be seen; with on_error="return" it becomes an
        output with a problem, beside neighbours that are served.
        """
        raises = require.one_of(OnError, "on_error", on_error) is OnError.RAISE
        queue = as_requests(prompts, sampling_params, forced, lora, self.tokenizer)[::-1]
        for request in queue[::-1] if raises else ():
            self.checked(*request[:3], lora=request.lora)
        order: dict[str, int] = {}
        outputs: list[Output] = []
        with self._reader.reads(self):
            while queue or self.scheduler.requests:
                while queue and len(self.scheduler.waiting) < self.scheduler.limits.max_waiting:
                    asked, own, tokens, adapter = queue.pop()
                    order[request_id := self.new_id(self.scheduler.requests)] = len(order)
                    prompt = None
                    try:
                        prompt = as_prompt(asked, self.tokenizer)
                        self.queue(self.checked(prompt, own, tokens, lora=adapter), request_id)
                    except (EngineError, InvalidValue) as error:
                        outputs.append(refused(request_id, prompt, own, self._identity, error))
                outputs += [each.output for each in self._step() if each.output is not None]
                if raises:
                    require_served(outputs)
        return sorted(outputs, key=lambda output: (order[output.request_id], output.sample_index))

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> Iterator[SampleUpdate]:
        """Tokens as they come, of all samples of one prompt. Closing the iterator early aborts the request."""
        checked = self.checked(prompt, sampling_params, stream_text=True, lora=lora)
        with self._reader.reads(self):
            self.queue(checked)
            while self.scheduler.requests:
                yield from self._step()

    def add_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        forced: Sequence[int] = (),
        stream_text: bool = False,
        lora: str | None = None,
    ) -> str:
        """Queue a request, and give back its id: `step` tells of it. What could never be served raises."""
        self._reader.require_none()
        checked = self.checked(prompt, sampling_params, forced, stream_text=stream_text, lora=lora)
        return self.queue(checked, request_id)

    def checked(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        forced: Sequence[int] = (),
        *,
        stream_text: bool = False,
        lora: str | None = None,
    ) -> CheckedRequest:
        """A request that can be queued, or what it is refused for. Any thread may ask."""
        prompt = as_prompt(prompt, self.tokenizer)
        (sampling,) = as_sampling(sampling_params, 1)
        check_request(prompt, sampling, forced, self.facts)
        self.scheduler.limits.check_room(len(prompt.token_ids), sampling.max_tokens)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=draw_seed())
        return CheckedRequest(prompt, sampling, tuple(forced), stream_text, self.adapters.require(lora))

    def new_id(self, taken: Container[str]) -> str:
        """One that is not in `taken`, whatever ids a user gave. Any thread may ask: no number is given twice."""
        return next(name for number in self._numbers if (name := f"request-{number}") not in taken)

    def queue(self, request: CheckedRequest, request_id: str | None = None) -> str:
        """Queue what was checked, and give back its id."""
        require.instance(InvalidValue, "request_id", request_id, str | None)
        prompt, sampling, forced, stream_text, lora = request
        with self.owned():
            self.adapters.require_same(lora)
            request_id = self.new_id(self.scheduler.requests) if request_id is None else request_id
            ids, salt = prompt.token_ids, prompt.cache_salt
            self.scheduler.add(Sample(0, request_id, 0, ids, sampling, salt, forced, stream_text, lora))
            # Only this number changes: reading all of them off a thousand requests takes as long as a small step.
            self._metrics = msgspec.structs.replace(self._metrics, waiting=len(self.scheduler.waiting))
        return request_id

    def step(self) -> list[SampleUpdate]:
        """One forward over everything that can run; returns what each sample got in it, oldest first."""
        self._reader.require_none()
        return self._step()

    def abort(self, request_id: str) -> list[SampleUpdate]:
        """End a request now; its samples come back with the tokens that they have."""
        with self.owned():
            updates = [self._update(sample) for sample in self.scheduler.abort(request_id)]
            if not self.scheduler.samples:
                self._steps.drop()
            self._publish()
        return updates

    def stage_weights(self, state: Mapping[str, torch.Tensor], version: str | WeightVersion) -> StagedWeights:
        """Copy the weights of `state` beside those that run, verify them, and try them. Any thread may, at any time."""
        return stage(self.model, state, version)

    def retain_weights(self) -> StagedWeights:
        """A copy of the weights that run, to be swapped in again later."""
        with self.owned():
            copied = copy_running(self.model, self.version)
        return copied.retained()

    def swap_weights(
        self,
        state: Mapping[str, torch.Tensor] | StagedWeights,
        version: str | WeightVersion | None = None,
        kv: str = "recompute",
        before: Callable[[], object] = lambda: None,
    ) -> WeightVersion:
        """From the next step on, the weights of `state`, all of them or, if anything is wrong, none.

        `kv` is "recompute" (exact under the new weights alone), "keep" (who is in flight keeps its KV, and its lineage says so)
        or "drain" (none is in flight). What was staged has its version. `before` runs when nothing else can refuse the swap.
        """
        policy = swap_policy(kv, in_flight=self.has_unfinished)
        if isinstance(state, StagedWeights) != (version is None):
            raise InvalidValue("staged weights come with their version, and others need one: give a label")
        self.adapters.require_none()
        staged = state if isinstance(state, StagedWeights) else stage(self.model, state, version or "")
        staged.check_fits(self.model)
        with self.owned():
            before()
            self._steps.drop()
            # An interrupt between two tensors would leave a mixture: until all are written, nothing may run.
            self.broken = InvariantBroken("a swap of weights was interrupted halfway; make the engine anew")
            staged.copy_into(self.model)
            self.scheduler.swap(staged.version, policy)
            self._identify()
            self.broken = None
            self._publish()
        return staged.version

    def load_adapter(
        self, name: str | LoraAdapter, source: AdapterSource = None, config: Any = None, **limits: Any
    ) -> AdapterVersion:
        """Requests may ask for adapter `name` from now on, never merged: a PEFT directory or model, or tensors with their config;
        what `adapters.staged` gave comes alone. `replace=True`: it takes the name, and who is in flight keeps the old one."""
        adapter = name if isinstance(name, LoraAdapter) else self.adapters.staged(name, source, config)
        with self.owned():
            version = self.adapters.load(adapter, **limits)
            self._identify()
        return version

    def unload_adapter(self, name: str, *, in_use: str = "refuse") -> None:
        """Forget adapter `name`. Where a request in flight has it: refused, or with `in_use="keep"` kept for that alone."""
        with self.owned():
            self.adapters.unload(name, in_use)
            self._identify()

    def reset_cache(self) -> None:
        """Forget every cached prefix that no request in flight looks at."""
        with self.owned():
            self._steps.drop()
            self.scheduler.cache.clear()
            self._publish()

    def fingerprint(self) -> EngineFingerprint:
        """Who computes: facts are named as in the other engines' fingerprints. Any thread may ask."""
        return self._fingerprint

    def metrics(self) -> EngineMetrics:
        """The engine in numbers, as they were after its last step. Any thread may ask."""
        return self._metrics

    @contextmanager
    def owned(self) -> Iterator[None]:
        """By one thread, and never again once the engine stopped itself."""
        if not self._user.acquire(blocking=False):
            raise EngineError(
                "another thread is using this engine; share it through EngineLoop, or give each thread its own"
            )
        try:
            if self.broken is not None:
                raise self.broken
            yield
        except (InvariantBroken, BitsDiffer) as error:
            self.broken = error
            raise
        finally:
            self._user.release()

    def check(self) -> None:
        """Stop the engine, with a dump of its books, if they contradict themselves. Runs by itself when idle."""
        self._steps.drop()
        try:
            consistency.check(self.scheduler)
        except InvariantBroken as error:
            error.dump = consistency.dump(self.scheduler)
            self.broken = error
            raise

    def _step(self) -> list[SampleUpdate]:
        with self.owned():
            begin = time.perf_counter()
            try:
                if (step := self._steps.next()) is None:
                    return []
                changed = self.scheduler.commit(step.plan, self._steps.rounds(step))
            except BaseException:
                self._steps.ahead = None
                self.scheduler.discard()
                raise
            self._clock.runs += step.ticket.waited
            updates = [self._update(sample) for sample in changed]
            self._clock.steps += time.perf_counter() - begin
            for sample, update in zip(changed, updates, strict=True):
                if update.output is not None:
                    with applied(self.model, self.adapters.over_all(sample.lora)):
                        self._spot_check.look(self.model, sample, update.output, self.scheduler.running)
            if not self.scheduler.samples:
                self.check()
            self._publish()
        return updates

    def _update(self, sample: Sample) -> SampleUpdate:
        if sample.phase is not Phase.FINISHED:
            return update_of(sample, self._texts.take(sample), None)
        whole, rest = self._texts.finish(sample)
        return update_of(sample, rest, output_of(sample, self._identity, whole))

    def _publish(self) -> None:
        """Numbers of now, for whoever asks: a value, since others ask while the next step changes what it is made of."""
        self._metrics = metrics_of(self.scheduler, self._clock, self.runner, self._spot_check)

    def _identify(self) -> None:
        loaded = self.adapters.versions
        self._fingerprint = fingerprint_of(self.model, self.scheduler, self.facts, self.mode, loaded)
        self._identity = Identity(self.mode.kind, self._fingerprint.digest, self._fingerprint.numeric)
