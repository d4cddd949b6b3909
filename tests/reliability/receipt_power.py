"""How many canary tokens does a receipt need? Updates at the learning rates of RL, sent, lost, and of nothing.

    python tests/reliability/receipt_power.py [--engine exact] [--updates 500] [--tokens 16384]
    python tests/reliability/receipt_power.py --engine vllm --python .engines/vllm-0.32.0/bin/python --updates 20

A trainer with a master copy in fp32 takes AdamW steps and sends its weights in bf16. After each update both sides score
the canaries, and receipts are taken with the first 256, 1,024, … tokens of them: of what was sent (honest), of the engine
as if nothing had come (lost), and of the engine asked again under the same weights by a trainer that changed nothing. On
a processor the exact engine computes in fp32 with the weights that were rounded to bf16; on a GPU, with --device cuda, all
of it is bf16. There, what the engine would say is computed by the forward that trainer and engine share, all canaries at
once, which costs a fifth; every 50th update the engine itself is asked, and must say the same bits. All canaries are scored
around every 50th update, and the first 1,024 tokens around each. One line a learning rate and number of tokens; as JSON to $OUT/receipt_power.json where $OUT is set.
"""

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from zerodrift import exact, models
from zerodrift.core.errors import EngineUnreachable
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.verification import packed
from zerodrift.stats.arrays import Floats
from zerodrift.sync.canary import LENGTH, Canary, random_canary
from zerodrift.sync.judge import Arrival, CanaryScores, SideFacts, judge
from zerodrift.sync.measure import trainer_scores

SIZES = (256, 512, 1024, 4096, 16384)
SPEC = "testbed:qwen3"
SHAPES = {"tiny": (512, 128, 2), "small": (8192, 512, 4), "0.6B": (151_936, 1024, 28)}
"""Vocabulary, width and layers."""
OTHERS = 50
"""Updates from one at which the exact engine itself is asked to the next: it has never given other bits."""
ROWS = 256
"""Canaries in one forward."""
WHOLE = 50
"""Updates from one around which all canaries are scored to the next."""
MOST = 1024
"""Canary tokens around every other."""
TRIES = 4


class Moment(NamedTuple):
    """What both sides say of one version; the engine is asked twice."""

    trainer: Floats
    engine: Floats
    again: Floats
    seconds: float


class ExactSide:
    """The exact engine in this process."""

    def __init__(self, model: Any) -> None:
        import zerodrift as zd

        dtype = None if model.device.type == "cuda" else "float32"
        self._dtype = torch.bfloat16 if dtype is None else torch.float32
        self.engine = zd.Engine(
            model.to(self._dtype), enable_prefix_caching=False, max_num_batched_tokens=8192, max_waiting=4096
        )

    def push(self, sent: Any, label: str) -> None:
        state = {name: tensor.to(self._dtype) for name, tensor in sent.state_dict().items()}
        self.engine.swap_weights(state, label)

    @torch.no_grad()
    def score(self, canary: Canary) -> Floats:
        """By the engine's model, its rows having one set of bits whatever stands beside them."""
        model, found = self.engine.model, []
        for begin in range(0, len(canary.sequences), ROWS):
            part = canary.sequences[begin : begin + ROWS]
            hidden_BLH = torch.stack(packed(model, part))
            ids_BL = torch.tensor(part, device=model.device)
            logits_RV = exact.head(model, hidden_BLH[:, :-1].flatten(0, 1))
            logprobs_R = log_softmax(logits_RV).gather(-1, ids_BL[:, 1:].reshape(-1, 1))[:, 0]
            found += logprobs_R.double().tolist()
        return np.array(found)

    def asked(self, canary: Canary) -> Floats:
        """By requests."""
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0)
        outputs = self.engine.generate([Prompt(ids) for ids in canary.sequences], asked)
        return np.array(
            [value for output in outputs for value in output.prompt_logprobs if value is not None]
        )


class VllmSide:
    """A real server, which reads directories; requests go out together, so that its batches differ from call to call."""

    def __init__(self, backend: Any, folder: Path) -> None:
        self._backend, self._folder = backend, folder

    def push(self, sent: Any, label: str) -> None:
        directory = self._folder / label.replace(" ", "-")
        sent.save_pretrained(directory)
        self._backend.load_weights(directory, WeightVersion(label))

    def score(self, canary: Canary) -> Floats:
        return self.asked(canary)

    def asked(self, canary: Canary) -> Floats:
        for _ in range(TRIES):
            # On a machine that is overloaded a server closes a connection that it is about to be asked on.
            with contextlib.suppress(EngineUnreachable):
                return canary.flat("vLLM", self._backend.score(canary.sequences))
        return canary.flat("vLLM", self._backend.score(canary.sequences))


@contextlib.contextmanager
def opened(options: argparse.Namespace, model: Any) -> Iterator[Any]:
    if options.engine == "exact":
        yield ExactSide(copy.deepcopy(model))
        return
    from zerodrift.backends.vllm import VllmBackend
    from zerodrift.backends.vllm_launch import launch_vllm

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = models.materialise(SPEC, folder / "served", dtype="bfloat16")
        flags = [
            "--dtype",
            "bfloat16",
            "--enforce-eager",
            "--max-model-len",
            "1024",
            "--served-model-name",
            "tiny",
        ]
        with (
            launch_vllm(Path(options.python), served, flags, {}, folder / "log", 1200.0) as server,
            contextlib.closing(VllmBackend(server.url, explicit=True, timeout_s=600)) as backend,
        ):
            yield VllmSide(backend, folder)


def trainer_of(options: argparse.Namespace) -> Any:
    if options.engine == "vllm":
        return models.load(SPEC, dtype="float32")
    vocabulary, width, layers = SHAPES[options.size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32 if options.size == "tiny" else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def updates(options: argparse.Namespace, rate: float, side: Any, master: Any) -> Iterator[Moment]:
    """Of the weights at the start, and after each step."""
    model = copy.deepcopy(master)
    vocabulary = model.config.vocab_size
    canary = random_canary(vocabulary, options.tokens, avoid=range(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for number in range(options.updates + 1):
        if number:
            ids = torch.tensor(random_canary(vocabulary, 128, seed=number).sequences, device=model.device)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        sent = rounded(model)
        side.push(sent, f"{rate:g} {number}")
        whole = number % WHOLE < 2
        scored = canary if whole else canary.first(MOST // (LENGTH - 1))
        begin = time.perf_counter()
        engine = side.score(scored)
        trainer = trainer_scores(sent, scored)
        took = time.perf_counter() - begin
        twice = options.engine == "vllm" or number % OTHERS == OTHERS // 2
        yield Moment(trainer, engine, side.asked(scored) if twice else engine, took)


def rounded(model: Any) -> Any:
    """What is sent: parameters in bf16. `model.to(bfloat16)` would round its rotary frequencies too, which engines keep."""
    sent = copy.deepcopy(model).eval()
    for parameter in sent.parameters():
        parameter.data = parameter.data.bfloat16()
    return sent


class Tally:
    """What receipts said at one learning rate, by the number of canary tokens."""

    def __init__(self, rate: float, tokens: int) -> None:
        self.rate, self.sizes = rate, [size for size in SIZES if size <= tokens]
        self.said: dict[int, dict[str, Counter[Arrival]]] = {size: {} for size in self.sizes}
        self.slopes: dict[int, list[float]] = {size: [] for size in self.sizes}
        self.signal: list[float] = []
        self.noise: list[float] = []
        self.seconds: list[float] = []
        self.bits = 0
        self._last: Moment | None = None

    def add(self, moment: Moment) -> None:
        if len(moment.engine) >= self.sizes[-1]:
            self.seconds.append(moment.seconds)
        self.bits += int((moment.engine != moment.again).sum())
        last, self._last = self._last, moment
        if last is None:
            return
        both = min(len(last.engine), len(moment.engine))
        moved = moment.trainer[:both] - last.trainer[:both]
        self.signal.append(float(np.sqrt((moved**2).mean())))
        self.noise.append(float(np.abs(moment.engine - moment.trainer).mean()))
        for size in [size for size in self.sizes if size <= both]:
            for what, scores in cases(last, moment, size).items():
                found = judge(scores, {}, SideFacts())
                self.said[size].setdefault(what, Counter())[found.arrival] += 1
                if what == "honest":
                    self.slopes[size].append(found.fit.estimate)

    def rows(self) -> Iterator[dict[str, Any]]:
        for size in [size for size in self.sizes if self.slopes[size]]:
            yield {
                "rate": self.rate,
                "tokens": size,
                "updates": len(self.slopes[size]),
                "said": {what: dict(counts) for what, counts in self.said[size].items()},
                "slope": float(np.mean(self.slopes[size])),
                "slope_sd": float(np.std(self.slopes[size])),
                "signal": float(np.mean(self.signal)),
                "error": float(np.mean(self.noise)),
                "asked_again_differ": self.bits,
                "seconds": float(np.median(self.seconds)) * size / self.sizes[-1],
            }


def cases(old: Moment, new: Moment, size: int) -> dict[str, CanaryScores]:
    sequence = np.arange(size) // (LENGTH - 1)
    first = slice(0, size)
    return {
        "honest": CanaryScores(
            old.trainer[first], new.trainer[first], old.engine[first], new.engine[first], sequence
        ),
        "lost": CanaryScores(
            old.trainer[first], new.trainer[first], old.engine[first], old.again[first], sequence
        ),
        "nothing": CanaryScores(
            old.trainer[first], old.trainer[first], old.engine[first], old.again[first], sequence
        ),
    }


def line(row: dict[str, Any]) -> str:
    def of(what: str, arrival: Arrival) -> str:
        counts = row["said"][what]
        return f"{counts.get(arrival, 0):>5}/{sum(counts.values())}"

    return (
        f"{row['rate']:>6g} {row['tokens']:>7} {of('lost', Arrival.MISSED):>11} {of('honest', Arrival.CONFIRMED):>11} "
        f"{of('honest', Arrival.MISSED):>11} {of('nothing', Arrival.MISSED):>11} {row['slope']:>7.3f} ± {row['slope_sd']:<6.3f} "
        f"{row['signal']:>8.2g} {row['error']:>8.2g} {row['seconds']:>7.2f}"
    )


def keep(tallies: list[Tally]) -> None:
    """After every update: a run that is broken off has shown something."""
    if "OUT" in os.environ:
        rows = [row | {"line": line(row)} for tally in tallies for row in tally.rows()]
        Path(os.environ["OUT"], "receipt_power.json").write_text(json.dumps(rows, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("exact", "vllm"), default="exact")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SHAPES), default="tiny", help="of the exact engine's model")
    parser.add_argument("--python", default=".engines/vllm-0.32.0/bin/python")
    parser.add_argument("--updates", type=int, default=500, help="at each learning rate")
    parser.add_argument("--tokens", type=int, default=SIZES[-1])
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-6, 1e-5))
    options = parser.parse_args()
    head = "  rate  tokens   lost seen   confirmed false alarm  of nothing   slope            signal   mean|Δ| seconds"
    sys.stdout.write(head + "\n")
    master = trainer_of(options)
    tallies = [Tally(rate, options.tokens) for rate in options.rates]
    with opened(options, master) as side:
        for tally in tallies:
            for moment in updates(options, tally.rate, side, master):
                tally.add(moment)
                keep(tallies)
            for row in tally.rows():
                sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
