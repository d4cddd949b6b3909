"""How many canary tokens does a receipt need? Updates at the learning rates of RL, sent, lost, and of nothing.

    python tests/reliability/receipt_power.py --out exact.jsonl [--engine exact] [--updates 500] [--tokens 16384]
    python tests/reliability/receipt_power.py --out vllm.jsonl --engine vllm --python .engines/vllm-0.32.0/bin/python
    python tests/reliability/receipt_power.py --out gpu.jsonl --engine vllm --python python3 --device cuda \\
        --gpu-memory-utilization 0.3 --env PYTHONPATH=SITE -- --attention-backend TRITON_ATTN
    python tests/reliability/receipt_power.py --merge exact.jsonl vllm.jsonl gpu.jsonl

A trainer with a master copy in fp32 takes AdamW steps and sends its weights in bf16. After each update both sides score
the canaries; then the same weights are sent once more, and the engine is asked again. What receipts would have said of
the update, of one that was lost, and of the one of nothing is a line of --out (`power_rows.py`), written at once: a run that
is broken off goes on where it stopped, by repeating its command. On a processor the exact engine computes in fp32 with the
weights that were rounded to bf16; with --device cuda all of it is bf16. What it would say is computed by the forward that
trainer and engine share, all canaries at once, which costs a fifth, the second time in another order; at every 50th update
the engine itself is asked, by requests. All --tokens are scored around every --whole-th update, and the first 1,024 around each.
"""

import argparse
import contextlib
import copy
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from power_rows import SIZES, Moment, Sums, read, table
from transformers import AutoModelForCausalLM, Qwen3Config

from zerodrift import exact, models
from zerodrift.backends.vllm import VllmBackend
from zerodrift.backends.vllm_launch import flags, launch_vllm, transfer_flags
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError, EngineUnreachable
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.verification import packed
from zerodrift.stats.arrays import Floats
from zerodrift.sync.canary import LENGTH, Canary, random_canary
from zerodrift.sync.measure import trainer_scores

SPEC = "testbed:qwen3"
SHAPES = {"tiny": (512, 128, 2), "small": (8192, 512, 4), "0.6B": (151_936, 1024, 28)}
"""Vocabulary, width and layers; `testbed` is SPEC, 3 layers of width 256."""
ASKED = 50
"""Updates from one at which the exact engine is asked by requests to the next: it has never given other bits."""
ROWS = 256
"""Canaries in one forward."""
MOST = 1024
"""Canary tokens around every update."""
TRIES = 4


class ExactSide:
    """The exact engine in this process."""

    def __init__(self, model: Any) -> None:
        import zerodrift as zd

        self._dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
        self.name = f"exact-{'bf16' if model.device.type == 'cuda' else 'fp32'}"
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

    def again(self, canary: Canary, number: int) -> Floats:
        if number % ASKED == ASKED // 2:
            return self.asked(canary)
        order = list(range(len(canary.sequences)))
        random.Random(number).shuffle(order)
        scores = self.score(Canary(tuple(canary.sequences[place] for place in order))).reshape(-1, LENGTH - 1)
        back = np.empty_like(scores)
        back[order] = scores
        return back.ravel()

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
        self.name = f"vllm-{backend.fingerprint().numeric['vllm']}"

    def push(self, sent: Any, label: str) -> None:
        directory = self._folder / label.replace(" ", "-")
        sent.save_pretrained(directory)
        self._backend.load_weights(directory, WeightVersion(label))
        shutil.rmtree(directory)

    def score(self, canary: Canary) -> Floats:
        for _ in range(TRIES):
            # On a machine that is overloaded a server closes a connection that it is about to be asked on.
            with contextlib.suppress(EngineUnreachable):
                return canary.flat("vLLM", self._backend.score(canary.sequences))
        return canary.flat("vLLM", self._backend.score(canary.sequences))

    def again(self, canary: Canary, _: int) -> Floats:
        return self.score(canary)


@contextlib.contextmanager
def opened(options: argparse.Namespace, model: Any) -> Iterator[Any]:
    if options.engine == "exact":
        yield ExactSide(copy.deepcopy(model))
        return
    env = dict(pair.split("=", 1) for pair in options.env)
    config = EngineConfig(
        name="vllm",
        python=options.python,
        args=tuple(options.server),
        env=env,
        max_model_len=1024,
        enforce_eager=True,
        async_scheduling=None,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )
    arguments = [*flags(config, "bfloat16"), *transfer_flags(options.python, env)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = models.materialise(SPEC, folder / "served", dtype="bfloat16")
        rounded(model).save_pretrained(served)
        with (
            launch_vllm(options.python, served, arguments, env, folder / "log", 1200.0) as server,
            contextlib.closing(VllmBackend(server.url, explicit=True, timeout_s=600)) as backend,
        ):
            yield VllmSide(backend, folder)


def trainer_of(options: argparse.Namespace) -> Any:
    if options.size == "testbed":
        return models.load(SPEC, dtype="float32").to(options.device)
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
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def updates(
    options: argparse.Namespace, rate: float, side: Any, master: Any, done: int
) -> Iterator[tuple[int, Moment]]:
    """Of the weights after `done` steps, and after each further one."""
    model = copy.deepcopy(master)
    vocabulary = model.config.vocab_size
    canary = random_canary(vocabulary, options.tokens, seed=options.seed, avoid=range(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for number in range(options.updates + 1):
        if number:
            seed = 100_000 * options.seed + number
            ids = torch.tensor(random_canary(vocabulary, 128, seed=seed).sequences, device=model.device)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        if number < done:
            continue
        scored = canary if number % options.whole < 2 else canary.first(MOST // (LENGTH - 1))
        yield number, moment(side, rounded(model), scored, f"{rate:g} {number}", number)


def moment(side: Any, sent: Any, canary: Canary, label: str, number: int) -> Moment:
    side.push(sent, label)
    begin = time.perf_counter()
    engine = side.score(canary)
    between = time.perf_counter()
    trainer = trainer_scores(sent, canary)
    end = time.perf_counter()
    side.push(sent, f"{label} again")
    return Moment(trainer, engine, side.again(canary, number), end - between, between - begin)


def rounded(model: Any) -> Any:
    """What is sent: parameters in bf16. `model.to(bfloat16)` would round its rotary frequencies too, which engines keep."""
    sent = copy.deepcopy(model).eval()
    for parameter in sent.parameters():
        parameter.data = parameter.data.bfloat16()
    return sent


def run(options: argparse.Namespace) -> None:
    """Writes the lines of `options.out` that are missing."""
    facts = {"size": options.size, "device": options.device, "seed": options.seed}
    kept = list(read(options.out))
    if any({key: line["run"][key] for key in facts} != facts for line in kept):
        raise ConfigError(f"{options.out} is of another run than {facts}; give another file")
    # A line that was cut is written again.
    options.out.write_text("".join(json.dumps(line) + "\n" for line in kept))
    master = trainer_of(options)
    with opened(options, master) as side, options.out.open("a") as file:
        for rate in options.lr:
            done = max((line["number"] for line in kept if line["lr"] == rate), default=0)
            if done >= options.updates:
                continue
            moments = updates(options, rate, side, master, done)
            sums = Sums(next(moments)[1])
            for number, now in moments:
                head = {"run": {"engine": side.name, **facts}, "lr": rate, "number": number}
                file.write(json.dumps(head | sums.line(now)) + "\n")
                file.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("exact", "vllm"), default="exact")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the trainer and the exact engine"
    )
    parser.add_argument(
        "--size", choices=("testbed", *SHAPES), help="of the model: tiny, and testbed for vLLM"
    )
    parser.add_argument("--python", default=".engines/vllm-0.32.0/bin/python", help="that has vLLM")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for vLLM; may be repeated")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("server", nargs="*", help="behind --, what else goes to vLLM's server")
    parser.add_argument("--updates", type=int, default=500, help="at each learning rate")
    parser.add_argument("--tokens", type=int, choices=SIZES, default=SIZES[-1])
    parser.add_argument("--whole", type=int, default=50, help="all tokens around every so many-th update")
    parser.add_argument("--lr", type=float, nargs="+", default=(1e-6, 1e-5))
    parser.add_argument(
        "--seed", type=int, default=0, help="of the training, the canaries and the random weights"
    )
    parser.add_argument("--out", type=Path, help="lines of JSON, one an update; goes on where it stopped")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="files of lines, to make one table of; nothing is run"
    )
    options = parser.parse_args()
    options.size = options.size or ("testbed" if options.engine == "vllm" else "tiny")
    if (options.out is None) == (options.merge is None):
        parser.error("give --out FILE to run, or --merge FILE ... to see what was run")
    return options


def main() -> int:
    options = arguments()
    files = options.merge or [options.out]
    if not options.merge:
        run(options)
    sys.stdout.write(table(line for path in files for line in read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
