"""The run that docs/trl.md shows: TRL's GRPOTrainer on a built-in model, whose rollouts come from a function that begins to
report raw logprobs (temperature 1, as vLLM does unless told otherwise) at generation BAD_FROM.

    TRL_EXPERIMENTAL_SILENCE=1 python docs/trl_run.py DIRECTORY BAD_FROM
"""

import logging
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import zerodrift as zd
from zerodrift.integrations.sinks.jsonl import Jsonl
from zerodrift.integrations.trl import attach

TEMPERATURE = 0.7
directory, bad_from = Path(sys.argv[1]), int(sys.argv[2])
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
generations = 0


def rollout(prompts, trainer):
    """Plain generation, with the logprobs of what was drawn."""
    global generations
    ids = torch.tensor([trainer.processing_class(prompt)["input_ids"] for prompt in prompts])
    with torch.no_grad():
        answer = trainer.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=trainer.generation_config,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    scores = torch.stack(answer.scores, dim=1).float()
    if generations >= bad_from:
        scores = scores * TEMPERATURE
    generations += 1
    drawn = answer.sequences[:, ids.shape[1] :]
    found = scores.log_softmax(-1).gather(2, drawn[..., None])[..., 0].tolist()
    end = trainer.processing_class.eos_token_id
    kept = [row[: row.index(end) + 1] if end in row else row for row in drawn.tolist()]
    logprobs = [row[: len(tokens)] for row, tokens in zip(found, kept, strict=True)]
    return {"prompt_ids": ids.tolist(), "completion_ids": kept, "logprobs": logprobs}


def reward(completions, **_):
    """Many different characters."""
    return [len(set(text)) / 10 for text in completions]


tokenizer = zd.models.tokenizer("testbed:qwen3")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
trainer = GRPOTrainer(
    model=zd.models.load("testbed:qwen3"),
    reward_funcs=reward,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"prompt": [f"count to {n}" for n in range(10, 90)]}),
    rollout_func=rollout,
    args=GRPOConfig(
        output_dir=str(directory), max_steps=8, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=48, temperature=TEMPERATURE, gradient_checkpointing=False, use_cpu=True, bf16=False,
        report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no", seed=1,
    ),
)  # fmt: skip
trainer.pop_callback(PrinterCallback)
with attach(
    trainer,
    zd.Monitor(precision="fp32", archive=directory / "archive"),
    sinks=[Jsonl(directory / "steps.jsonl")],
):
    trainer.train()
shown = ("zerodrift/state", "zerodrift/mismatch/mean_abs", "zerodrift/mismatch/bias", "grad_norm", "reward")
print("step ", *(name.removeprefix("zerodrift/") for name in shown))
for entry in trainer.state.log_history[:-1]:
    print(
        f"{entry['step']:<5}",
        *(f"{entry[name]:<{len(name.removeprefix('zerodrift/'))}.3g}" for name in shown),
    )
print(f"stopped after {trainer.state.global_step} of {trainer.state.max_steps} steps")
