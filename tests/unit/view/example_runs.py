"""Small run directories with plausible numbers, written through the same records as an audit's."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from zerodrift.core.cause import CAUSES
from zerodrift.core.completion import EngineFingerprint
from zerodrift.drift.summary import DriftSummary
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.stats.ratios import sequence_ess, token_ess

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

ENGINE = EngineFingerprint(
    engine="vllm",
    semantic={
        "model": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "logprobs_mode": "raw_logprobs",
        "generation_config": "auto",
        "weights": "51d1c2b8a9f0e3d4",
        "hf_overrides": "{}",
    },
    numeric={
        "dtype": "bfloat16",
        "attention_backend": "CPU_ATTN",
        "head_dtype": "model",
        "enable_prefix_caching": "true",
        "torch": "2.11.0",
        "vllm": "0.32.0",
    },
    deployment={"max_model_len": "2048", "max_num_seqs": "128", "machine": "x86_64", "threads": "2"},
)
REFERENCE = EngineFingerprint(
    engine="reference",
    semantic={
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weights": "51d1c2b8a9f0e3d4",
    },
    numeric={
        "dtype": "float32",
        "attention_backend": "sdpa",
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "isa": "AVX512",
    },
    deployment={"device": "cpu", "threads": "2", "machine": "x86_64"},
)


class Drawn(NamedTuple):
    """Columns of tokens.parquet before a fault is planted in them."""

    columns: dict[str, Any]

    @property
    def delta(self) -> Any:
        return self.columns["contracted"] - self.columns["reported"]


def draw(sequences: int = 48, length: int = 90, scale: float = 0.012) -> Drawn:
    """Tokens of a healthy engine: |Δ| of about `scale`, heavier in the tails, larger on rare tokens."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(length // 3, length, sequences)
    count = int(lengths.sum())
    prompts = np.repeat(rng.integers(5, 60, sequences), lengths)
    index = np.concatenate([np.arange(each) for each in lengths])
    contracted = -rng.gamma(0.55, 1.6, count)
    sigma = 0.004 + 0.003 * np.sqrt(-contracted)
    token = rng.integers(0, len(WORDS), count)
    return Drawn(
        {
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
    )


def metrics(drawn: Drawn) -> dict[str, float]:
    """As the parity probe reports them."""
    possible = np.isfinite(drawn.columns["contracted"])
    delta, sequence = drawn.delta[possible], drawn.columns["sequence"][possible]
    summary = DriftSummary.of(delta)
    p90, p99 = np.quantile(np.abs(delta), (0.9, 0.99))
    return {
        "tokens": float(summary.count),
        "mean": summary.mean,
        "mean_low": summary.mean * 0.96,
        "mean_high": summary.mean * 1.05,
        "p90": float(p90),
        "p99": float(p99),
        "max": summary.max,
        "k3": summary.k3,
        "signed_mean": summary.signed_mean,
        "token_ess": token_ess(delta),
        "sequence_ess": sequence_ess(delta, sequence),
        "impossible_tokens": float((~possible).sum()),
    }


def probe(name: str, status: Outcome, says: str, **more: Any) -> ProbeRecord:
    return ProbeRecord(name=name, status=status, says=says, **{"required": False, "seconds": 1.25} | more)


def cause(name: str, explained: float, evidence: str, **more: Any) -> CauseFound:
    known = CAUSES[name]
    settled: dict[str, Any] = {
        "gating": known.gating,
        "interval": (max(0.0, explained - 0.02), min(1.0, explained + 0.01)),
        "fix": known.fix("vllm"),
        "found_by": "attribution",
    }
    return CauseFound(cause=name, explained=explained, evidence=evidence, **settled | more)


def write(directory: Path, record: VerdictRecord, drawn: Drawn | None) -> Path:
    """A run directory; `drawn` None leaves tokens.parquet out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "verdict.json").write_bytes(msgspec.json.encode(record))
    (directory / "config.yaml").write_text(
        "model:\n  path: SmolLM2-360M\nengine:\n  url: http://127.0.0.1:8000\n"
    )
    environment = {
        "zerodrift": "0.1.0",
        "packages": {"torch": "2.11.0", "scipy": None},
        "cores": 2,
        "devices": [],
    }
    (directory / "environment.json").write_bytes(msgspec.json.encode(environment))
    if drawn is not None:
        write_tokens(directory / "tokens.parquet", drawn.columns)
    return directory


def verdict(outcome: Outcome, **more: Any) -> VerdictRecord:
    settled: dict[str, Any] = {
        "engine": ENGINE,
        "reference": REFERENCE,
        "model": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "precision": "bf16",
        "floor": FLOOR,
        "gates": GATES,
        "metrics": {},
        "reproduce": REPRODUCE,
    }
    return VerdictRecord(verdict=outcome, **settled | more)


def passing(directory: Path) -> Path:
    """A healthy bf16 engine, with one effect below the gate."""
    drawn = draw()
    found = metrics(drawn)
    says = "Engine and reference are the same policy, within the rounding that their precision allows."
    batch = "212 of 512 tokens differ, by 0.0021 on average and 0.013 at most"
    record = verdict(
        Outcome.PASS,
        guilty="none",
        says=says,
        metrics=found,
        causes=(cause("path/batch-variance", 0.41, batch, found_by="batch"),),
        probes=(
            probe(
                "contract", Outcome.PASS, "48 completions: prompts as sent, logprobs finite", required=True
            ),
            probe("parity", Outcome.PASS, f"mean |Δ| {found['mean']:.3g}", required=True, evidence=found),
            probe(
                "sampling",
                Outcome.PASS,
                "z = −0.42, p = 0.67",
                required=True,
                evidence={"z": -0.42, "p": 0.67},
            ),
            probe(
                "repeat",
                Outcome.PASS,
                "512 tokens, every bit equal",
                evidence={"tokens": 512, "differing": 0},
            ),
            probe("batch", Outcome.PASS, batch, evidence={"tokens": 512, "differing": 212}),
            probe("cache", Outcome.INCONCLUSIVE, "no prefix was served from the cache", vacuous=True),
        ),
    )
    return write(directory, record, drawn)


def failing(directory: Path) -> Path:
    """Raw logprobs at temperature 0.7, and a stale prefix cache besides."""
    drawn = draw()
    columns = drawn.columns
    columns["reported"] = columns["raw"] + (columns["reported"] - columns["contracted"])
    found = metrics(drawn)
    evidence = "reported as raw logprobs: 8,412 nats of evidence from what was reported"
    stale = (
        "fresh prompts answer with the new weights, 1,024 cached prompt tokens with the old ones' keys and values: "
        "replaying that explains 98.2% of the difference"
    )
    broken = f"mean |Δ| {found['mean']:.3g} > 0.03; p90 |Δ| {found['p90']:.3g} > 0.075"
    record = verdict(
        Outcome.FAIL,
        guilty="engine",
        says=CAUSES["semantic/raw-logprobs"].message,
        metrics=found,
        causes=(
            cause("semantic/raw-logprobs", 0.973, evidence),
            cause("weights/stale-prefix-cache", 0.982, stale, found_by="weight-sync"),
            cause("path/head-precision", 0.08, "top-k differences lie on the bf16 grid", found_by="head"),
        ),
        probes=(
            probe(
                "contract", Outcome.PASS, "48 completions: prompts as sent, logprobs finite", required=True
            ),
            probe("parity", Outcome.FAIL, broken, required=True, evidence=found),
            probe(
                "sampling",
                Outcome.PASS,
                "z = −0.42, p = 0.67",
                required=True,
                evidence={"z": -0.42, "p": 0.67},
            ),
            probe("cache", Outcome.INCONCLUSIVE, "the engine failed: HTTP 500 after 3 attempts"),
            probe("weight-sync", Outcome.FAIL, stale, evidence={"slope": 0.9998, "cached_tokens": 1024}),
        ),
    )
    return write(directory, record, drawn)


def inconclusive(directory: Path) -> Path:
    """An engine that never answered: no tokens, no numbers."""
    says = (
        "the engine failed: nothing answers at http://127.0.0.1:8000/v1; start it, or name another with --url"
    )
    record = verdict(
        Outcome.INCONCLUSIVE,
        guilty="unknown",
        says=f"contract: {says}",
        floor={},
        gates={},
        probes=(
            probe("contract", Outcome.INCONCLUSIVE, says, required=True),
            probe("parity", Outcome.INCONCLUSIVE, "nothing to compare", required=True),
        ),
    )
    return write(directory, record, None)


def hostile(directory: Path) -> Path:
    """Every string that a model, an engine or a file can choose is an attack, and some tokens are impossible."""
    drawn = draw(sequences=6, length=40)
    columns = drawn.columns
    for number, text in enumerate(HOSTILE):
        columns["text"][number] = text
        columns["reported"][number] -= 5.0 + number
    columns["contracted"][len(HOSTILE)] = -np.inf
    attack = " ".join(HOSTILE[:-1])
    facts = {attack: attack, "dtype": attack}
    engine = EngineFingerprint(engine=attack, semantic=facts, numeric=facts, deployment=facts)
    record = verdict(
        Outcome.FAIL,
        guilty="engine",
        says=attack,
        engine=engine,
        model=attack,
        precision=attack,
        metrics=metrics(drawn),
        causes=(cause("semantic/temperature", 0.9, attack, fix=attack, found_by=attack),),
        probes=(probe(attack, Outcome.FAIL, attack, evidence={attack: attack, "flag": True}),),
        reproduce=attack,
    )
    write(directory, record, drawn)
    (directory / "config.yaml").write_text(f"{attack}\n{attack}")
    (directory / "environment.json").write_bytes(msgspec.json.encode({attack: attack}))
    return directory


def exact(directory: Path) -> Path:
    """An engine whose every logprob is the reference's, bit for bit."""
    drawn = draw(sequences=8, length=30)
    drawn.columns["reported"] = drawn.columns["contracted"].copy()
    says = "Engine and reference are the same policy, within the rounding that their precision allows."
    record = verdict(Outcome.PASS, guilty="none", says=says, metrics=metrics(drawn), reproduce="")
    return write(directory, record, drawn)


RUNS = {
    "passing": passing,
    "failing": failing,
    "inconclusive": inconclusive,
    "hostile": hostile,
    "exact": exact,
}
