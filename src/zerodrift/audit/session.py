"""From a configuration to a finished run directory: open both sides, audit, write down what was found."""

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np

from zerodrift import models
from zerodrift.audit.probes.given import check_weights
from zerodrift.audit.prompts import from_file, generated
from zerodrift.audit.run import Audit, Audited, Baseline, Progress
from zerodrift.audit.trainers import open_trainer
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import Served, open_engine
from zerodrift.config.load import dump
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import ConfigError, RecordError
from zerodrift.core.request import Prompt
from zerodrift.core.task import Scorer
from zerodrift.records import directory as files
from zerodrift.records.baseline import read_header, read_rows
from zerodrift.records.codec import write_atomically
from zerodrift.records.tokens import write_tokens

DEFAULT_MODEL = "testbed:qwen3"
PRECISIONS = {"float32": Precision.FP32, "float64": Precision.FP32, "bfloat16": Precision.BF16}
LONGEST_PROMPT = 512
"""Prompts of an audit are cut off here: attention is quadratic and faults are not."""

Wrap = Callable[[Backend], Backend]


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One audit, as the command line or a test asks for it."""

    config: RunConfig
    directory: Path
    sync: bool = False
    """Push a perturbed checkpoint through the engine's update path."""
    resets_cache: bool = True
    wrap: Wrap | None = None
    """Plants a fault in the engine."""

    def run(self, progress: Progress, reproduce: str = "") -> Audited:
        """Audit, and leave everything but the report in the directory."""
        self._prepare()
        progress.stage("load")
        spec = self.config.model.path or DEFAULT_MODEL
        baseline = self._baseline()
        reference = self._reference(spec, baseline)
        checkpoint = self._checkpoint(spec)
        served = Served(str(checkpoint or spec), self.config.model.dtype)
        trainer = self._trainer(spec)
        with self._engine(served) as opened:
            engine = opened if self.wrap is None else self.wrap(opened)
            fingerprint = engine.fingerprint()
            audit = Audit(
                engine=engine,
                reference=reference,
                trainer=trainer,
                baseline=baseline,
                prompts=self._prompts(reference, engine.max_model_len),
                sampling=msgspec.structs.replace(
                    self.config.sampling_defaults.params(), max_tokens=self.config.validation.max_tokens
                ),
                validation=self.config.validation,
                precision=self.config.validation.precision or precision_of(fingerprint),
                directory=self.directory,
                checkpoint=checkpoint if self.sync else None,
                resets_cache=self.resets_cache,
                progress=progress,
            )
            audited = audit.run()
        record = msgspec.structs.replace(audited.record, reproduce=reproduce)
        audited = dataclasses.replace(audited, record=record)
        self._write(audited, reference)
        return audited

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path, content = self.directory / files.CONFIG, dump(self.config).encode()
        if path.exists() and path.read_bytes() != content:
            raise RecordError(
                f"{self.directory} holds a run with another configuration; choose another --out, "
                "or repeat that run's options to resume it"
            )
        write_atomically(path, content)

    def _baseline(self) -> Baseline | None:
        path = self.config.validation.baseline
        if path is None:
            return None
        rows = tuple(read_rows(Path(path)))
        if not any(row.output for row in rows):
            raise RecordError(
                f"{path} holds no row with an output; finish it with `zerodrift baseline record`"
            )
        return Baseline(read_header(Path(path)), rows)

    def _reference(self, spec: str, baseline: Baseline | None) -> ReferenceBackend:
        validation = self.config.validation
        recorded = None if baseline is None else baseline.header.reference.numeric.get("dtype")
        dtype = recorded if validation.reference_dtype == "auto" else validation.reference_dtype
        reference = ReferenceBackend(validation.reference_model or spec, dtype=dtype)
        if baseline is not None:
            check_weights(reference, baseline.header)
        return reference

    def _trainer(self, spec: str) -> Scorer | None:
        named = self.config.validation.trainer
        return None if named is None else open_trainer(named, spec)

    def _checkpoint(self, spec: str) -> Path | None:
        """A directory that an engine can be pointed at: the model's own, or a testbed model written out."""
        if not spec.startswith("testbed:"):
            return Path(spec)
        if self.config.engine.name == "reference" and not self.sync:
            return None
        return models.materialise(spec, self.directory / "model")

    def _engine(self, served: Served) -> AbstractContextManager[Backend]:
        return open_engine(self.config.engine, served, self.directory)

    def _prompts(self, reference: ReferenceBackend, max_model_len: int) -> list[Prompt]:
        validation, facts = self.config.validation, reference.facts
        room = min(max_model_len, facts.context_length) - validation.max_tokens
        if room < 1:
            raise ConfigError(
                f"max_tokens={validation.max_tokens} leaves no room for a prompt in a context of {max_model_len}"
            )
        longest = min(room, LONGEST_PROMPT)
        if validation.prompts is not None:
            return from_file(Path(validation.prompts), reference.tokenizer, longest, validation.num_prompts)
        return generated(
            reference.tokenizer, facts.vocab_size, longest, validation.num_prompts, validation.seed
        )

    def _write(self, audited: Audited, reference: ReferenceBackend) -> None:
        files.write_verdict(self.directory, audited.record)
        if (table := audited.table) is not None:
            known = {token: reference.tokenizer.decode([token]) for token in np.unique(table.token).tolist()}
            columns = {**vars(table), "text": [known[token] for token in table.token.tolist()]}
            write_tokens(self.directory / files.TOKENS, columns)


def precision_of(fingerprint: EngineFingerprint) -> Precision:
    """What the engine says it computes in; it must say so, because the gates hang on it."""
    dtype = fingerprint.numeric.get("dtype", "unknown").removeprefix("torch.")
    if dtype not in PRECISIONS:
        raise ConfigError(
            f"the engine says it computes in {dtype!r}, which names no precision profile; "
            "say which one applies: --set validation.precision=fp32|bf16|fp8"
        )
    return PRECISIONS[dtype]


def command_line(arguments: list[str]) -> str:
    """How to type this audit again."""
    return shlex.join(["zerodrift", *arguments])
