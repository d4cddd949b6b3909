"""The exact engine, as the auditor sees it: in process, with everything that a probe can ask for."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import Answer, EngineFingerprint, FinishReason, Problem
from zerodrift.core.errors import BadAnswer, ConfigError, EngineError, InvalidValue, ModelError
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import Output, SampleUpdate

# Settings that this engine has no way to obey: what is asked for is refused, never passed over.
_UNKNOWN = (
    "url",
    "served_model",
    "api_key_env",
    "route",
    "python",
    "args",
    "env",
    "gpu_memory_utilization",
    "async_scheduling",
    "enforce_eager",
    "tensor_parallel_size",
    "kv_cache_dtype",
    "generation_config",
    "startup_timeout_s",
    "request_timeout_s",
    "concurrency",
)
_TAKEN = ("block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")


class ExactBackend:
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

    def fingerprint(self) -> EngineFingerprint:
        """The engine's own."""
        return self.engine.fingerprint()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests at once."""
        self._check_lengths(requests)
        outputs = self.engine.generate(
            [request.prompt for request in requests], [request.sampling for request in requests]
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
        for output in self.engine.generate([Prompt(tuple(ids)) for ids in sequences], asked):
            if output.problem is not None:
                raise BadAnswer(f"a sequence cannot be scored: {output.problem.message}")
            scored.append([value for value in output.prompt_logprobs if value is not None])
        return scored

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As the tokenizer does by default, special tokens included."""
        return tuple(self.engine.tokenizer(text)["input_ids"])

    def render_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The checkpoint's own chat template."""
        return tuple(
            self.engine.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        )

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
    for name in _UNKNOWN:
        if (value := getattr(config, name)) != getattr(defaults, name):
            raise ConfigError(
                f"engine.{name} is {value!r}, and the exact engine has no such setting; leave it out"
            )
    if config.enable_chunked_prefill is False:
        raise ConfigError(
            "engine.enable_chunked_prefill is false, and the exact engine cuts prefills wherever max_num_batched_tokens "
            "says so, without an effect on any bit; leave it out"
        )
