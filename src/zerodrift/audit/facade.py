"""Two front doors for code that wants one answer and no run directory.

    baseline = zd.ReferenceBaseline.record("./model", ["The capital of France is"], "base.jsonl")
    with zd.EquivalenceValidator("http://127.0.0.1:8000", "./model") as validator:
        assert validator.validate_batch(prompts, n_trials=64).passed

Floor, gates and scores are those of the audit; what passes is decided by the mean alone, of all tokens and of each
sequence. What the audit asks beyond that (p90, k3, sampling, caches, weight updates) they do not ask, so a report that
passed is not a verdict of PASS.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from zerodrift import models
from zerodrift.audit import baseline as recording
from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.measure import Observed, measure
from zerodrift.audit.observe import BATCH
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.prompts import tokenise
from zerodrift.audit.session import precision_of
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import IN_PROCESS, ServedModel, open_engine
from zerodrift.config.engine import EngineConfig
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.core import require
from zerodrift.core.errors import BadAnswer, DigestMismatch, InvalidValue
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.floor import ROUNDED_IN
from zerodrift.drift.gates import LEAST_TOKENS, gates_for
from zerodrift.records.baseline import BaselineHeader, BaselineRow, read_finished

AnyPrompt = str | Sequence[int] | Prompt
"""Text for the model's own tokenizer, token ids, or a prompt."""
Model = str | Path | ReferenceBackend
"""A checkpoint directory, `testbed:NAME`, or a reference that is loaded already."""

LEAST_PASS_RATE = 0.995
# As `zerodrift baseline record` and `zerodrift audit` sample where nobody says otherwise.
RECORDED = SamplingParams(max_tokens=64, seed=0)
VALIDATED = SamplingParams(max_tokens=32)


@dataclass(frozen=True)
class ReferenceBaseline:
    """Prompts with the reference's own samples and logprobs, bound to the weights by digest."""

    path: Path
    header: BaselineHeader
    rows: tuple[BaselineRow, ...]
    """In the order of the prompts."""

    @classmethod
    def record(
        cls,
        model: Model,
        prompts: Sequence[AnyPrompt],
        path: str | Path,
        *,
        sampling: SamplingParams = RECORDED,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Self:
        """Sample every prompt once; a file that holds some of them already is completed."""
        reference = _reference(model)
        recording.record(reference, _prompts(prompts, reference.tokenizer), sampling, Path(path), progress)
        return cls.load(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recorded file, whole."""
        place = Path(path)
        return cls(place, *read_finished(place))

    def check(self, model: Model) -> None:
        """Raise unless `model` has the weights that made the rows."""
        digest = _reference(model).version.digest
        if digest != self.header.weights:
            raise DigestMismatch(
                f"{self.path} was recorded from weights {self.header.weights}, and this model has {digest}; "
                "record the baseline again, or compare with the checkpoint that it was made from"
            )


class EquivalenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far engine and reference are apart, per sampled token and in nats."""

    mean: float
    """Mean |Δ|; infinite where the engine sampled a token that the request excludes."""
    max: float
    pass_rate: float
    """Share of the sequences asked for that came back for the right prompt with a mean |Δ| within the gate."""
    passed: bool
    """The mean is within the gate, and so are 99.5% of the sequences."""
    gate: float
    """For mean |Δ|: the precision profile's, or a multiple of the measured rounding floor where that is higher."""
    tokens: int


class EquivalenceValidator:
    """Compares an engine with the reference on prompts of one's own."""

    def __init__(
        self,
        engine: Backend | EngineConfig | str,
        reference: Model,
        *,
        sampling: SamplingParams = VALIDATED,
        precision: Precision | None = None,
        seed: int = 0,
    ) -> None:
        """`engine` is a backend, its configuration, its name, or the address of a server.

        What is opened here is closed on leaving; a backend that was handed in stays its owner's. `precision` None
        reads it off the engine's own dtype.
        """
        self.reference = _reference(reference)
        self.sampling = sampling
        self.seed = seed
        self._precision = precision
        self._held = ExitStack()
        self.engine = self._opened(_config(engine)) if isinstance(engine, str | EngineConfig) else engine

    def validate_batch(self, prompts: Sequence[AnyPrompt], n_trials: int) -> EquivalenceReport:
        """Sample `n_trials` sequences, dealt over the prompts in turn, and score them with the reference."""
        rule = f"sample each of the {len(prompts)} prompts at least once"
        require.whole(InvalidValue, "n_trials", n_trials, rule, max(1, len(prompts)))
        asked = _prompts(prompts, self.reference.tokenizer)
        observed = self._observe(parity_requests(asked, self.sampling, n_trials, self.seed))
        tokens = sum(len(item.completion.token_ids) for item in observed)
        if tokens < LEAST_TOKENS:
            raise InvalidValue(
                f"{n_trials} sequences gave {tokens} tokens, and fewer than {LEAST_TOKENS} decide nothing; "
                "raise n_trials or sampling.max_tokens"
            )
        gate = self._gate(observed)
        stop_ids = self.reference.facts.eos_token_ids
        sizes = [np.abs(item.delta) for item in measure(self.reference.teacher, observed, stop_ids)]
        mean = float(np.concatenate(sizes).mean())
        pass_rate = float(sum(size.mean() <= gate for size in sizes) / n_trials)
        return EquivalenceReport(
            mean=mean,
            max=float(max(size.max() for size in sizes)),
            pass_rate=pass_rate,
            passed=pass_rate >= LEAST_PASS_RATE and mean <= gate,
            gate=gate,
            tokens=tokens,
        )

    def close(self) -> None:
        """Close the engine, and stop it, where we opened it. Safe to call twice."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, config: EngineConfig) -> Backend:
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="zerodrift-")))
            model = str(self.reference.spec)
            if config.name not in IN_PROCESS and config.url is None and model.startswith("testbed:"):
                model = str(models.materialise(model, folder / "model"))
            engine = held.enter_context(open_engine(config, ServedModel(model, "auto"), folder))
            self._held = held.pop_all()
        return engine

    def _observe(self, requests: Sequence[Request]) -> list[Observed]:
        """What came back with tokens for the prompt that was sent; the rest counts as not passed."""
        parts = (requests[begin : begin + BATCH] for begin in range(0, len(requests), BATCH))
        answers = ((part, self.engine.generate(part)) for part in parts)
        observed = [
            Observed(completion, request.sampling)
            for part, answered in answers
            for request, answer in zip(part, answered, strict=True)
            for completion in answer.completions
            if completion.token_ids and completion.prompt_token_ids == request.prompt.token_ids
        ]
        if not observed:
            raise BadAnswer(
                f"none of {len(requests)} requests was answered with tokens for its own prompt; "
                "`zerodrift audit` says what came back instead"
            )
        return observed

    def _gate(self, observed: Sequence[Observed]) -> float:
        precision = self._precision or precision_of(self.engine.fingerprint())
        some = some_of(observed)
        passages, params = [item.passage for item in some], [item.requested for item in some]
        floor = measure_floor(self.reference.model, passages, ROUNDED_IN[precision], sampled_with=params)
        return gates_for(PROFILES[precision].gate, floor).mean


def _reference(model: Model, dtype: str | None = None) -> ReferenceBackend:
    return model if isinstance(model, ReferenceBackend) else ReferenceBackend(model, dtype=dtype)


def _config(engine: str | EngineConfig) -> EngineConfig:
    if isinstance(engine, EngineConfig):
        return engine
    if engine.startswith(("http://", "https://")):
        return EngineConfig(name="vllm", url=engine)
    return EngineConfig(name=engine)


def _prompts(prompts: Sequence[AnyPrompt], tokenizer: Any) -> list[Prompt]:
    if isinstance(prompts, str) or not prompts:
        raise InvalidValue(
            f"prompts are {prompts!r}; give a list of at least one text, list of ids or Prompt"
        )
    return [_prompt(prompt, tokenizer) for prompt in prompts]


def _prompt(prompt: AnyPrompt, tokenizer: Any) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    return tokenise(tokenizer, prompt) if isinstance(prompt, str) else Prompt(tuple(prompt))
