"""The runs that docs/trl.md shows: TRL's GRPOTrainer whose tokens come from a real vLLM server, which gets the weights of
every step before it draws.

    TRL_EXPERIMENTAL_SILENCE=1 python docs/trl_vllm_run.py DIRECTORY processed_logprobs 25
    TRL_EXPERIMENTAL_SILENCE=1 python docs/trl_vllm_run.py DIRECTORY raw_logprobs 25    # vLLM's default

`--url` takes a server that runs already (it must see DIRECTORY, and serve the model in DIRECTORY/model); without it one is
started out of .engines, as docs/vllm.yaml says.
"""

import argparse
import logging
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import zerodrift as zd
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.backends.vllm import VllmBackend
from zerodrift.config.load import load
from zerodrift.integrations.sinks.jsonl import Jsonl
from zerodrift.integrations.trl import attach
from zerodrift.integrations.trl_rollouts import EngineRollouts

MODEL = "testbed:qwen3"
SETTINGS = Path(__file__).parent / "vllm.yaml"
SHOWN = ("state", "mismatch/mean_abs", "mismatch/bias", "lag/max", "entropy")


def reward(completions, **_):
    """Many different characters."""
    return [len(set(text)) / 10 for text in completions]


def trainer_of(engine, directory, steps, **changes):
    """GRPO at temperature 0.7; the engine is asked with the very parameters of this configuration."""
    tokenizer = zd.models.tokenizer(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = GRPOTrainer(
        model=zd.models.load(MODEL),
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"count to {n}" for n in range(10, 90)]}),
        rollout_func=EngineRollouts(engine, directory / "weights"),
        args=GRPOConfig(
            output_dir=str(directory / "trainer"), max_steps=steps, per_device_train_batch_size=16, num_generations=4,
            temperature=0.7, gradient_checkpointing=False, use_cpu=True, bf16=False, report_to="none", logging_steps=1,
            disable_tqdm=True, save_strategy="no", seed=1,
            **{"max_completion_length": 64, "learning_rate": 1e-3, **changes},
        ),
    )  # fmt: skip
    trainer.pop_callback(PrinterCallback)
    return trainer


@contextmanager
def server(directory, logprobs_mode):
    """A vLLM of our own, with our plugin for weight updates; stopped in the end."""
    model = zd.models.materialise(MODEL, directory / "model")
    # One thread: the numbers are the same, and a trainer beside it has the other core.
    changes = (f"engine.logprobs_mode={logprobs_mode}", "engine.env.OMP_NUM_THREADS='1'")
    config = load(SETTINGS, changes).engine
    with open_engine(config, ServedModel(str(model), "float32"), directory) as engine:
        yield engine


def run(engine, directory, steps, **changes):
    """Train under watch, with `changes` of TRL's configuration; returns the trainer, whose log has everything."""
    trainer = trainer_of(engine, directory, steps, **changes)
    monitor = zd.Monitor(precision="fp32", archive=directory / "archive")
    with attach(trainer, monitor, sinks=[Jsonl(directory / "steps.jsonl")]):
        trainer.train()
    return trainer


def main():
    """One run, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("logprobs_mode", choices=("processed_logprobs", "raw_logprobs"))
    parser.add_argument("steps", type=int)
    parser.add_argument("--url")
    asked = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
    at = asked.directory.resolve()
    opened = (
        nullcontext(VllmBackend(asked.url, explicit=True)) if asked.url else server(at, asked.logprobs_mode)
    )
    with opened as engine:
        facts = engine.fingerprint()
        print(f"{facts.engine} {facts.numeric['vllm']} reports {facts.semantic['logprobs_mode']}")
        trainer = run(engine, at, asked.steps)
    print("step ", *SHOWN, "grad_norm", "reward")
    entries = [entry for entry in trainer.state.log_history if "zerodrift/state" in entry]
    for entry in entries:
        numbers = [(name, entry["zerodrift/" + name]) for name in SHOWN]
        numbers += [(name, entry[name]) for name in ("grad_norm", "reward")]
        print(f"{entry['step']:<5}", *(f"{value:<{len(name)}.3g}" for name, value in numbers))
    names = ("OK", "WARN", "QUARANTINE", "HALT")
    states = Counter(names[int(entry["zerodrift/state"])] for entry in entries)
    print(
        f"{trainer.state.global_step} of {asked.steps} steps:",
        ", ".join(f"{states[name]} {name}" for name in names),
    )


if __name__ == "__main__":
    main()
