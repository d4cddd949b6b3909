"""Small run directories with plausible numbers, written through the same records as an audit's."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zerodrift.core.cause import CAUSES
from zerodrift.core.completion import EngineFingerprint
from zerodrift.drift.summary import DriftSummary
from zerodrift.records.directory import write_verdict
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.stats.ratios import sequence_ess, token_ess

Columns = dict[str, Any]
"""Of tokens.parquet."""
WORDS = (
    " the", " model", " answers", ",", " and", " then", ".", "\n", " so", " we", " multiply", " 12", " by", " 7",
    " to", " get", " 84", "\n\n", "The", " sum", " of", " two", " odd", " numbers", " is", " even", "\t", "return",
    " x", " +", " 1", "  ", " où", " 東京", " שלום", "🙂",
)  # fmt: skip
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202eevil\u202c",
    "\x00\x7f\x9b31m\u2028\ufeff",
    "{{ 7 * 191 }}{% raw %}",
    "&lt;b&gt;<!--",
    "\u0301\u0302\u0303",
    "A" * 10_000_000,
)
REPRODUCE = "zerodrift audit --config runs/2026-11-15T03-10/config.yaml --seed 7"
GATES = {"mean": 0.03, "p90": 0.075, "k3": 0.002, "veto": 2.0}
FLOOR = {"mean": 0.0041, "p90": 0.0102, "variants": 8.0}
WEIGHTS = {"weights": "51d1c2b8a9f0e3d4"}
ENGINE = EngineFingerprint(
    engine="vllm",
    semantic={"model": "SmolLM2", "logprobs_mode": "raw_logprobs", "generation_config": "auto", **WEIGHTS},
    numeric={"dtype": "bfloat16", "attention_backend": "CPU_ATTN", "torch": "2.11.0", "vllm": "0.32.0"},
    deployment={"max_model_len": "2048", "max_num_seqs": "128", "threads": "2"},
)
REFERENCE = EngineFingerprint(
    engine="reference",
    semantic={"logprobs_mode": "processed_logprobs", "generation_config": "vllm", **WEIGHTS},
    numeric={"dtype": "float32", "attention_backend": "sdpa", "torch": "2.11.0", "isa": "AVX512"},
    deployment={"device": "cpu", "threads": "2"},
)
SAME = "Engine and reference are the same policy, within the rounding that their precision allows."


def draw(sequences: int = 48, length: int = 90, scale: float = 0.012) -> Columns:
    """Tokens of a healthy engine: |Δ| of about `scale`, heavier in the tails, larger on rare tokens."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(length // 3, length, sequences)
    count = int(lengths.sum())
    prompts = np.repeat(rng.integers(5, 60, sequences), lengths)
    index = np.concatenate([np.arange(each) for each in lengths])
    contracted = -rng.gamma(0.55, 1.6, count)
    sigma = 0.004 + 0.003 * np.sqrt(-contracted)
    token = rng.integers(0, len(WORDS), count)
    return {
        "sequence": np.repeat(np.arange(sequences), lengths),
        "index": index,
        "position": index + prompts,
        "token": token + 1000,
        "text": [WORDS[each] for each in token],
        "reported": contracted - rng.standard_t(4, count) * sigma * scale / 0.006,
        "contracted": contracted,
        "raw": 0.8 * contracted - 0.1,
        "entropy": -0.9 * contracted,
        "variance": np.abs(contracted),
        "by_likelihood": np.linspace(0, 1, len(contracted)),
        "by_id": np.linspace(0, 1, len(contracted)),
        "sigma": sigma,
    }


def raw(columns: Columns) -> Columns:
    """The same tokens with raw logprobs reported."""
    return columns | {"reported": columns["raw"] + (columns["reported"] - columns["contracted"])}


def metrics(columns: Columns) -> dict[str, float]:
    """As the parity probe reports them."""
    possible = np.isfinite(columns["contracted"])
    delta = (columns["contracted"] - columns["reported"])[possible]
    summary = DriftSummary.of(delta)
    return {
        "tokens": float(summary.count),
        "mean": summary.mean,
        "mean_low": summary.mean * 0.96,
        "mean_high": summary.mean * 1.05,
        "p90": float(np.quantile(np.abs(delta), 0.9)),
        "max": summary.max,
        "k3": summary.k3,
        "token_ess": token_ess(delta),
        "sequence_ess": sequence_ess(delta, columns["sequence"][possible]),
        "impossible_tokens": float((~possible).sum()),
    }


def probe(name: str, status: Outcome, says: str, **more: Any) -> ProbeRecord:
    return ProbeRecord(name=name, status=status, message=says, **{"required": False, "seconds": 1.25} | more)


def cause(name: str, explained: float, evidence: str, **more: Any) -> CauseFound:
    known = CAUSES[name]
    settled: dict[str, Any] = {
        "gating": known.gating,
        "interval": (max(0.0, explained - 0.02), min(1.0, explained + 0.01)),
        "fix": known.fix("vllm"),
        "found_by": "attribution",
    }
    return CauseFound(cause=name, explained=explained, evidence=evidence, **settled | more)


def verdict(outcome: Outcome, **more: Any) -> VerdictRecord:
    settled: dict[str, Any] = {"guilty": "none", "message": "", "engine": ENGINE, "reference": REFERENCE}
    settled |= {"model": "SmolLM2", "precision": "bf16", "floor": FLOOR, "gates": GATES, "metrics": {}}
    return VerdictRecord(verdict=outcome, **settled | {"reproduce": REPRODUCE} | more)


def write(directory: Path, record: VerdictRecord, columns: Columns | None) -> Path:
    """A run directory; without `columns` it has no tokens.parquet."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text("model:\n  path: SmolLM2\nengine:\n  url: http://127.0.0.1:8000\n")
    packages = {"torch": "2.11.0", "scipy": None}
    environment = {"zerodrift": "0.1.0", "packages": packages, "cores": 2, "devices": []}
    (directory / "environment.json").write_bytes(msgspec.json.encode(environment))
    if columns is not None:
        write_tokens(directory / "tokens.parquet", columns)
    write_verdict(directory, record)
    return directory


SOUND = (
    probe("contract", Outcome.PASS, "48 completions: prompts as sent, logprobs finite", required=True),
    probe("sampling", Outcome.PASS, "z = −0.42", required=True, evidence={"z": -0.42, "p": 0.67}),
)


def passing(directory: Path) -> Path:
    """A healthy bf16 engine, with one effect below the gate."""
    columns = draw()
    found = metrics(columns)
    batch = "212 of 512 tokens differ, by 0.0021 on average and 0.013 at most"
    probes = (
        *SOUND,
        probe("parity", Outcome.PASS, f"mean |Δ| {found['mean']:.3g}", required=True, evidence=found),
        probe("repeat", Outcome.PASS, "every bit equal", evidence={"tokens": 512, "differing": 0}),
        probe("batch", Outcome.PASS, batch, evidence={"tokens": 512, "differing": 212}),
        probe("cache", Outcome.INCONCLUSIVE, "no prefix was served from the cache", vacuous=True),
    )
    causes = (cause("path/batch-variance", 0.41, batch, found_by="batch"),)
    return write(
        directory, verdict(Outcome.PASS, message=SAME, metrics=found, causes=causes, probes=probes), columns
    )


def failing(directory: Path) -> Path:
    """Raw logprobs at temperature 0.7, and a stale prefix cache besides."""
    columns = raw(draw())
    found = metrics(columns)
    stale = "fresh prompts answer with the new weights, 1,024 cached prompt tokens with the old ones' keys"
    broken = f"mean |Δ| {found['mean']:.3g} > 0.03; p90 |Δ| {found['p90']:.3g} > 0.075"
    causes = (
        cause("semantic/raw-logprobs", 0.973, "reported as raw logprobs: 8,412 nats of evidence"),
        cause("weights/stale-prefix-cache", 0.982, stale, found_by="weight-sync"),
        cause("path/head-precision", 0.08, "top-k differences lie on the bf16 grid", found_by="head"),
    )
    probes = (
        *SOUND,
        probe("parity", Outcome.FAIL, broken, required=True, evidence=found),
        probe("cache", Outcome.INCONCLUSIVE, "the engine failed: HTTP 500 after 3 attempts"),
        probe("weight-sync", Outcome.FAIL, stale, evidence={"slope": 0.9998, "cached_tokens": 1024}),
    )
    says = CAUSES["semantic/raw-logprobs"].message
    settled: dict[str, Any] = {"guilty": "engine", "message": says, "metrics": found}
    return write(directory, verdict(Outcome.FAIL, **settled, causes=causes, probes=probes), columns)


def inconclusive(directory: Path) -> Path:
    """An engine that never answered: no tokens, no numbers."""
    says = "the engine failed: nothing answers at http://127.0.0.1:8000/v1; start it"
    probes = (
        probe("contract", Outcome.INCONCLUSIVE, says, required=True),
        probe("parity", Outcome.INCONCLUSIVE, "nothing to compare", required=True),
    )
    settled: dict[str, Any] = {"guilty": "unknown", "message": f"contract: {says}", "floor": {}, "gates": {}}
    return write(directory, verdict(Outcome.INCONCLUSIVE, **settled, probes=probes), None)


def hostile(directory: Path) -> Path:
    """Every string that a model, an engine or a file can choose is an attack, and some tokens are impossible."""
    columns = draw(sequences=6, length=40)
    for number, text in enumerate(HOSTILE):
        columns["text"][number] = text
        columns["reported"][number] -= 5.0 + number
    columns["contracted"][len(HOSTILE)] = -np.inf
    attack = " ".join(HOSTILE[:-1])
    facts = {attack: attack, "dtype": attack}
    record = verdict(
        Outcome.FAIL,
        guilty="engine",
        message=attack,
        engine=EngineFingerprint(engine=attack, semantic=facts, numeric=facts, deployment=facts),
        model=attack,
        precision=attack,
        metrics=metrics(columns),
        causes=(cause("semantic/temperature", 0.9, attack, fix=attack, found_by=attack),),
        probes=(probe(attack, Outcome.FAIL, attack, evidence={attack: attack, "flag": True}),),
        reproduce=attack,
    )
    write(directory, record, columns)
    (directory / "config.yaml").write_text(f"{attack}\n{attack}")
    (directory / "environment.json").write_bytes(msgspec.json.encode({attack: attack}))
    write_verdict(directory, record)
    return directory


def exact(directory: Path) -> Path:
    """An engine whose every logprob is the reference's, bit for bit."""
    columns = draw(sequences=8, length=30)
    columns["reported"] = columns["contracted"].copy()
    return write(
        directory, verdict(Outcome.PASS, message=SAME, metrics=metrics(columns), reproduce=""), columns
    )


RUNS = {make.__name__: make for make in (passing, failing, inconclusive, hostile, exact)}
