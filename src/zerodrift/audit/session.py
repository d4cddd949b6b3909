"""From a configuration to a finished run directory: open both sides, audit, write down what was found."""

import dataclasses
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from zerodrift import models
from zerodrift.audit.pilot import fitted, measure_speed
from zerodrift.audit.probes.given import check_weights
from zerodrift.audit.progress import Progress
from zerodrift.audit.prompts import assorted, check_file, from_file, of_lengths
from zerodrift.audit.replay import Replay, Replayed
from zerodrift.audit.run import Audit, Audited
from zerodrift.audit.setup import RecordedBaseline
from zerodrift.audit.tasks import check_room
from zerodrift.audit.trainers import open_trainer
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import IN_PROCESS, ServedModel, check_engine, open_engine
from zerodrift.backends.vllm_facts import KEPT_BACK
from zerodrift.config.load import dump, load
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.errors import ConfigError, RecordError, ZerodriftError
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.task import Scorer, Task
from zerodrift.records import directory as files
from zerodrift.records.baseline import read_finished
from zerodrift.records.case import Case, write_case
from zerodrift.records.codec import write_atomically
from zerodrift.records.lock import only_writer
from zerodrift.records.seal import SEAL
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import Outcome
from zerodrift.tasks.checked import open_task, prompts_of

DEFAULT_MODEL = "testbed:qwen3"
PRECISIONS = {"float32": Precision.FP32, "float64": Precision.FP32, "bfloat16": Precision.BF16}
MODEL = "model"
"""A built-in model written out, where an engine needs a directory."""

Wrap = Callable[[Backend], Backend]


class Posed(NamedTuple):
    """A task and what it asks."""

    task: Task
    prompts: list[Prompt]


class Chosen(NamedTuple):
    """What is asked, and where it comes from."""

    prompts: list[Prompt]
    sources: str


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One audit, as the command line or a test asks for it."""

    config: RunConfig
    directory: Path
    sync: bool = False
    """Push a perturbed checkpoint through the engine's update path."""
    resets_cache: bool = True
    wrap: Wrap | None = None
    """Plants a fault in the engine."""
    planted: str = ""
    """Its name: a run with it is not resumed without it."""
    scorer: Callable[[Any], Scorer] | None = None
    """Plants a fault in the trainer: what stands in its place, made of a transformers model."""
    environment: bytes | None = None
    """What the run stands in, as JSON, to be kept beside it."""
    budget: float | None = None
    """Seconds, from which a pilot makes the numbers of prompts and trials; None takes those of the configuration."""

    def run(self, progress: Progress, reproduce: str = "") -> Audited:
        """Audit, and leave everything but the report in the directory.

        What can be refused is refused before the directory is touched.
        """
        files.check_run_directory(self.directory)
        check_engine(self.config.engine)
        if self.config.validation.prompts is not None:
            check_file(Path(self.config.validation.prompts))
        progress.stage("load")
        spec = self.config.model.path or DEFAULT_MODEL
        baseline = self._baseline()
        reference = self._reference(spec, baseline)
        trainer, posed = self._trainer(spec), self._posed(spec, reference)
        with self._made(), only_writer(self.directory / files.LOCK, self.directory):
            validation = self._as_written()
            if validation is not None:
                self._prepare(reference, validation)
            checkpoint = self._checkpoint(spec, self.directory)
            served = ServedModel(str(checkpoint or spec), self.config.model.dtype)
            with open_engine(self.config.engine, served, self.directory) as opened:
                engine = opened if self.wrap is None else self.wrap(opened)
                precision = self.config.validation.precision or precision_of(engine.fingerprint())
                # Gates that cannot go together are refused before anything is asked.
                self.config.validation.gate_for(precision)
                seeded = Capability.SEED in opened.capabilities
                if validation is None:
                    progress.stage("pilot")
                    validation = self._within_budget(engine, reference, posed, seeded=seeded)
                    self._prepare(reference, validation)
                chosen = self._prompts(reference, engine.max_model_len, posed, validation)
                audit = Audit(
                    engine=engine,
                    reference=reference,
                    trainer=trainer,
                    baseline=baseline,
                    task=None if posed is None else posed.task,
                    prompts=chosen.prompts,
                    sources=chosen.sources,
                    sampling=self._sampling,
                    validation=validation,
                    precision=precision,
                    directory=self.directory,
                    checkpoint=checkpoint if self.sync else None,
                    resets_cache=self.resets_cache,
                    seeded=seeded,
                    progress=progress,
                )
                audited = audit.run()
            audited = self._with_commands(audited, reproduce)
            self._write(audited, reference)
        return audited

    @property
    def _sampling(self) -> SamplingParams:
        params = self.config.sampling_defaults.params()
        return msgspec.structs.replace(params, max_tokens=self.config.validation.max_tokens)

    def _as_written(self) -> ValidationConfig | None:
        """What to ask, where that is known: a run with a budget that was begun keeps the numbers that its pilot wrote."""
        path = self.directory / files.CONFIG
        if self.budget is None:
            return self.config.validation
        if not path.exists():
            return None
        written = load(path).validation
        return msgspec.structs.replace(
            self.config.validation,
            num_prompts=written.num_prompts,
            equivalence_trials=written.equivalence_trials,
        )

    def _within_budget(
        self, engine: Backend, reference: ReferenceBackend, posed: Posed | None, *, seeded: bool
    ) -> ValidationConfig:
        assert self.budget is not None, "asked only with a budget"
        prompts = self._prompts(reference, engine.max_model_len, posed).prompts
        speed = measure_speed(engine, reference, prompts, self._sampling, seeded=seeded)
        return fitted(self.config.validation, speed, self.budget)

    def _with_commands(self, audited: Audited, reproduce: str) -> Audited:
        alone = f"{reproduce} --case {shlex.quote(str(self.directory / files.CASE))}"
        record = msgspec.structs.replace(
            audited.record,
            reproduce=_repeated(reproduce, self.directory, audited),
            reproduce_smallest=alone if reproduce and audited.case is not None else "",
        )
        return dataclasses.replace(audited, record=record)

    def replay(self, case: Case, progress: Progress) -> Replayed:
        """One case instead of an audit; nothing is kept."""
        check_engine(self.config.engine)
        progress.stage("load")
        spec = self.config.model.path or DEFAULT_MODEL
        reference = self._reference(spec, None)
        with tempfile.TemporaryDirectory(prefix="zerodrift-") as scratch:
            checkpoint = self._checkpoint(spec, Path(scratch))
            served = ServedModel(str(checkpoint or spec), self.config.model.dtype)
            with open_engine(self.config.engine, served, Path(scratch)) as opened:
                engine = opened if self.wrap is None else self.wrap(opened)
                progress.stage("replay")
                return Replay(engine, reference, case.limit)(case.requests)

    @contextmanager
    def _made(self) -> Iterator[None]:
        """The directory; one that was made for nothing is not left behind."""
        fresh = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except ZerodriftError:
            # A server that was started and failed leaves its log, which the message points to.
            left = {path.name for path in self.directory.iterdir()}
            if fresh and left <= {files.CONFIG, files.ASKED, files.ENVIRONMENT, files.LOCK, MODEL}:
                shutil.rmtree(self.directory)
            raise

    def _prepare(self, reference: ReferenceBackend, validation: ValidationConfig) -> None:
        config = msgspec.structs.replace(self.config, validation=validation)
        asked = files.Asked(
            planted=self.planted,
            sync=self.sync,
            resets_cache=self.resets_cache,
            weights=reference.version.digest or "",
        )
        for name, what, content in (
            (files.CONFIG, "another configuration", dump(config).encode()),
            (files.ASKED, "another fault, update or checkpoint", msgspec.json.encode(asked)),
        ):
            path = self.directory / name
            if path.exists() and path.read_bytes() != content:
                raise RecordError(
                    f"{self.directory} holds a run with {what}; choose another --out, "
                    "or repeat that run's options to resume it"
                )
            write_atomically(path, content)
        # Of a run that was killed or cut off; this one may find otherwise.
        for name in (files.CASE, files.VERDICT, SEAL, files.TOKENS, files.REPORT):
            (self.directory / name).unlink(missing_ok=True)
        if self.environment is not None:
            write_atomically(self.directory / files.ENVIRONMENT, self.environment)

    def _baseline(self) -> RecordedBaseline | None:
        path = self.config.validation.baseline
        if path is None:
            return None
        header, rows = read_finished(Path(path))
        if not any(row.output for row in rows):
            raise RecordError(f"{path} holds no row with an output; record one with longer outputs")
        return RecordedBaseline(header, rows)

    def _reference(self, spec: str, baseline: RecordedBaseline | None) -> ReferenceBackend:
        validation = self.config.validation
        recorded = None if baseline is None else baseline.header.reference.numeric.get("dtype")
        dtype = recorded if validation.reference_dtype == "auto" else validation.reference_dtype
        reference = ReferenceBackend(
            validation.reference_model or spec, dtype=dtype, device=validation.reference_device
        )
        if baseline is not None:
            check_weights(reference, baseline.header)
        return reference

    def _trainer(self, spec: str) -> Scorer | None:
        if self.scorer is not None:
            return self.scorer(models.load(spec))
        named = self.config.validation.trainer
        return None if named is None else open_trainer(named, spec)

    def _posed(self, spec: str, reference: ReferenceBackend) -> Posed | None:
        validation = self.config.validation
        if validation.task is None:
            return None
        task, vocab_size = open_task(validation.task, spec), reference.facts.vocab_size
        cure = "--set validation.num_prompts={} asks for as many"
        return Posed(task, prompts_of(task, validation.num_prompts, validation.seed, vocab_size, cure))

    def _checkpoint(self, spec: str, directory: Path) -> Path | None:
        """A directory that an engine can be pointed at: the model's own, or a testbed model written out."""
        if not spec.startswith("testbed:"):
            return Path(spec)
        if self.config.engine.name in IN_PROCESS and not self.sync:
            return None
        return models.materialise(spec, directory / MODEL)

    def _prompts(
        self,
        reference: ReferenceBackend,
        max_model_len: int,
        posed: Posed | None = None,
        validation: ValidationConfig | None = None,
    ) -> Chosen:
        """Of a `validation` that a budget changed, or of the configuration's own."""
        validation, facts = validation or self.config.validation, reference.facts
        context = min(max_model_len, facts.context_length, self.config.model.max_model_len or max_model_len)
        if context <= validation.max_tokens:
            raise ConfigError(
                f"max_tokens={validation.max_tokens} leaves no room for a prompt in a context of {context}"
            )
        if posed is not None:
            check_room(posed.task, posed.prompts, context, validation.max_tokens)
            return Chosen(posed.prompts, f"{len(posed.prompts)} prompts of task {validation.task}")
        longest = context - validation.max_tokens
        chosen, sources = self._long_prompts(reference, max_model_len), []
        count = validation.num_prompts
        if validation.prompts is not None:
            # A fifth is generated, to reach lengths and scripts that the file does not have.
            given = count - count // 5 if validation.property_based_prompts else count
            path, vocab_size = Path(validation.prompts), facts.vocab_size
            read = from_file(path, reference.tokenizer, longest, given, vocab_size)
            sources.append(f"{len(read)} prompts of {path.name}")
            chosen += read
            count -= given
        if chosen_by_length := len(validation.position_probes):
            sources.append(f"{chosen_by_length} at positions asked for")
        if count:
            answer, seed = validation.max_tokens, validation.seed
            chosen += assorted(reference.tokenizer, facts.vocab_size, longest, answer, count, seed)
            sources.append(f"{count} generated prompt{'s' if count > 1 else ''}")
        return Chosen(chosen, " and ".join(sources))

    def _long_prompts(self, reference: ReferenceBackend, max_model_len: int) -> list[Prompt]:
        """One for each position probe: prompt and output together end where it says."""
        validation, facts = self.config.validation, reference.facts
        ends = [round(fraction * facts.context_length) for fraction in validation.position_probes]
        for fraction, end in zip(validation.position_probes, ends, strict=True):
            if not validation.max_tokens < end <= max_model_len:
                raise ConfigError(
                    f"position probe {fraction:g} is a sequence of {end} tokens; the engine takes {max_model_len}, "
                    f"and {validation.max_tokens} of them are sampled: leave it out, or give the engine more"
                )
        lengths = [end - validation.max_tokens for end in ends]
        return of_lengths(facts.vocab_size, lengths, reference.tokenizer.all_special_ids, validation.seed)

    def _write(self, audited: Audited, reference: ReferenceBackend) -> None:
        if audited.case is not None:
            write_case(self.directory / files.CASE, audited.case)
        if (table := audited.table) is not None:
            known = {token: reference.tokenizer.decode([token]) for token in np.unique(table.token).tolist()}
            columns = {**table.columns, "text": [known[token] for token in table.token.tolist()]}
            write_tokens(self.directory / files.TOKENS, columns)
        files.write_verdict(self.directory, audited.record)


def precision_of(fingerprint: EngineFingerprint) -> Precision:
    """What the engine says it computes in; it must say so, because the gates hang on it."""
    dtype = fingerprint.numeric.get("dtype", "unknown").removeprefix("torch.")
    if dtype not in PRECISIONS:
        if (route := fingerprint.deployment.get(KEPT_BACK)) is not None:
            raise ConfigError(
                f"what the engine computes in stands in its settings, which it keeps back from this caller: {route}; put its "
                "admin token, or its --api-key, into a variable and name it: --set engine.api_key_env=NAME; or say which "
                "precision applies: --set validation.precision=fp32|bf16|fp8"
            )
        raise ConfigError(
            f"the engine says it computes in {dtype!r}, which names no precision profile; "
            "say which one applies: --set validation.precision=fp32|bf16|fp8"
        )
    return PRECISIONS[dtype]


def _repeated(command: str, directory: Path, audited: Audited) -> str:
    """A run that was cut off goes on where it is; a finished one is never judged again, and another is made."""
    record = audited.record
    resumes = record.verdict is Outcome.INCONCLUSIVE and any(probe.cut_off for probe in record.probes)
    return f"{command} --out {shlex.quote(str(directory))}" if command and resumes else command


def command_line(arguments: Sequence[str]) -> str:
    """How to type this audit again: in a directory of its own, for one with a verdict is refused."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["zerodrift", *kept])
