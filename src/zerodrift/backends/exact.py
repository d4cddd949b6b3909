"""The exact engine, as the auditor sees it: in process, with everything that a probe can ask for."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from zerodrift import models
from zerodrift.backends.base import Capability, OwnTokenizer
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import Answer, EngineFingerprint, FinishReason, Problem
from zerodrift.core.errors import (
    BadAnswer,
    ConfigError,
    EngineError,
    InvalidValue,
    ModelError,
    UnsupportedModel,
)
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output, SampleUpdate

_TAKEN = ("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
_OBEYED = {*_TAKEN, "name", "max_model_len", "logprobs_mode", "enable_chunked_prefill", "head_dtype"}
"""What is asked for beside these is refused, never passed over."""


class ExactBackend(OwnTokenizer):
    """One engine with a model of its own."""

    name = "exact"
    capabilities = frozenset(Capability)

    def __init__(
        self, spec: str | Path, *, dtype: str = "float32", config: EngineConfig | None = None
    ) -> None:
        """`spec` as in `models.load`; of `config` what the engine can obey, and None is the engine's default."""
        config = EngineConfig(name=self.name) if config is None else config
        _check(config)
        self.spec = spec
        self.config = config
        self.facts = models.facts(spec)
        self.max_model_len = config.max_model_len or self.facts.context_length
        self.dtype = dtype
        settings = {name: value for name in _TAKEN if (value := getattr(config, name)) is not None}
        try:
            self.engine = Engine(
                spec,
                dtype=dtype,
                # One more than is forwarded: scoring a sequence as long as the context draws a token after it.
                max_model_len=self.max_model_len + 1,
                logprobs_mode=config.logprobs_mode,
                # The auditor looks at the bits itself, and names a cause where the engine would only stop.
                logprob_check_interval=0,
                **settings,
            )
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"the exact engine, which is audited unless engine.name (--engine) says otherwise, cannot run this model: {error}. "
                "To audit the engine that serves it: --engine vllm, sglang or llama-cpp; or --engine reference"
            ) from error
        self.own_tokenizer = self.engine.tokenizer

    def fingerprint(self) -> EngineFingerprint:
        """The engine's own."""
        return self.engine.fingerprint()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests at once."""
        self._check_lengths(requests)
        outputs = self.engine.generate(
            [request.prompt for request in requests],
            [request.sampling for request in requests],
            on_error="return",
        )
        groups: dict[str, list[Output]] = {}
        for output in outputs:
            groups.setdefault(output.request_id, []).append(output)
        return [_answer(group) for group in groups.values()]

    def stream(self, requests: Sequence[Request]) -> list[Answer]:
        """All streams are open together: what a step gives to each is one piece of it."""
        self._check_lengths(requests)
        streams: dict[str, list[SampleUpdate]] = {}
        problems: dict[str, Problem] = {}
        try:
            for number, request in enumerate(requests):
                name = str(number)
                streams[name] = []
                try:
                    self.engine.add_request(
                        request.prompt, request.sampling, request_id=name, stream_text=True
                    )
                except (EngineError, InvalidValue) as error:
                    problems[name] = Problem(error.code, str(error))
            while self.engine.has_unfinished:
                for update in self.engine.step():
                    streams[update.request_id].append(update)
        finally:
            for name in list(self.engine.scheduler.requests):
                self.engine.abort(name)
        return [
            Answer((), (problems[name],)) if name in problems else _joined(updates)
            for name, updates in streams.items()
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As prompts, of which the prefix cache gives nothing: every position's logits are needed."""
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0)
        scored = []
        prompts = [Prompt(tuple(ids)) for ids in sequences]
        for output in self.engine.generate(prompts, asked, on_error="return"):
            if output.problem is not None:
                raise BadAnswer(f"a sequence cannot be scored: {output.problem.message}")
            scored.append([value for value in output.prompt_logprobs if value is not None])
        return scored

    def load_weights(self, directory: Path, version: WeightVersion) -> None:
        """All tensors or none. No cache is touched: what it holds has the old weights in its keys."""
        state = models.load(directory, dtype=self.dtype).state_dict()
        try:
            self.engine.swap_weights(state, version)
        except ModelError as error:
            raise ModelError(f"{directory} holds another model than the one that runs: {error}") from error

    def reset_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_cache()

    def close(self) -> None:
        """Nothing is held beyond the model and its KV."""

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if len(request.prompt.token_ids) + request.sampling.max_tokens > self.max_model_len:
                raise BadAnswer(
                    f"{len(request.prompt.token_ids)} prompt tokens and max_tokens={request.sampling.max_tokens} exceed "
                    f"the context of {self.max_model_len}; shorten one of the two"
                )


def _joined(updates: Sequence[SampleUpdate]) -> Answer:
    """What the updates of one request make, sample by sample: their tokens and logprobs, not those of the whole."""
    outputs = []
    for last in sorted(updates, key=lambda update: update.sample_index):
        if (output := last.output) is None:
            continue
        mine = [update for update in updates if update.sample_index == last.sample_index]
        if output.problem is None:
            output = msgspec.structs.replace(
                output,
                token_ids=tuple(token for update in mine for token in update.token_ids),
                logprobs=tuple(value for update in mine for value in update.logprobs),
            )
        outputs.append(output)
    deltas = sum(bool(update.token_ids) for update in updates)
    return msgspec.structs.replace(_answer(outputs), stream_deltas=deltas)


def _answer(outputs: Sequence[Output]) -> Answer:
    ended = [output for output in outputs if output.finish_reason is not FinishReason.ERROR]
    return Answer(
        tuple(output.completion() for output in ended),
        tuple(output.problem for output in outputs if output.problem is not None),
    )


def _check(config: EngineConfig) -> None:
    defaults = EngineConfig()
    for name in EngineConfig.__struct_fields__:
        if name not in _OBEYED and (value := getattr(config, name)) != getattr(defaults, name):
            raise ConfigError(
                f"engine.{name} is {value!r}, and the exact engine has no such setting; leave it out"
            )
    if config.enable_chunked_prefill is False:
        raise ConfigError(
            "engine.enable_chunked_prefill is false, and the exact engine cuts prefills wherever max_num_batched_tokens "
            "says so, without an effect on any bit; leave it out"
        )
