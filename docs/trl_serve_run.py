"""TRL's AsyncGRPO, as it is, trains a LoRA adapter against `zerodrift serve`:

    zerodrift serve ./model --weight-root ./runs/trl --port 8000
    python docs/trl_serve_run.py http://zd:TOKEN@127.0.0.1:8000 ./model ./runs/trl [STEPS]

Rollouts, pauses and updates are the trainer's own calls: it generates by /v1/completions, saves its adapter below the root of
the server, and has it loaded by /v1/load_lora_adapter under a new name for every version. What is not TRL's is there because
this runs without a GPU: attention, since its kernel for packed trees is for an H100 (`tree_attention` below), and an answer to
its question for the GPU's name.

Prints one line of JSON: what the server reported against the trainer's forward over the same tokens, step by step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AttentionInterface, AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Each segment of a packed tree looks at the keys of its own path, which ends with itself."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1)[0] for each in (key, value))
    parts = []
    rows, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for begin, end, first, last in zip(rows, rows[1:], paths, paths[1:], strict=False):
        places = tree_kv_index[first:last]
        scores = query[0, :, begin:end] @ key[:, places].mT * scaling
        count, seen = end - begin, last - first
        ahead = torch.arange(seen) > torch.arange(seen - count, seen)[:, None]
        parts.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value[:, places])
    return torch.cat(parts, dim=1).transpose(0, 1)[None].contiguous(), None


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Told(TrainerCallback):
    """What TRL logged of every step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step."""
        self.lines.append(
            {"step": state.global_step, **{k: v for k, v in logs.items() if isinstance(v, float)}}
        )


def main(address: str, model: str, root: str, steps: int) -> None:
    torch.cuda.get_device_name = lambda *_: "a processor"  # asked for peak FLOPs alone
    prompts = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(8) for b in range(8)]
    # Rendered here, and sent as ids; TRL reads answers back by the templates that it knows.
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template
    told = Told()
    trainer = AsyncGRPOTrainer(
        model,
        reward,
        AsyncGRPOConfig(
            output_dir=root, max_steps=steps, per_device_train_batch_size=8, num_generations=8, max_completion_length=16,
            learning_rate=5e-3, vllm_server_base_url=address, max_staleness=2, temperature=0.7, report_to=[],
            logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=1,
        ),
        Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[told],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]),
    )  # fmt: skip
    AttentionInterface.register("tree_fa3", tree_attention)
    trainer.train()
    sys.stdout.write(json.dumps(told.lines) + "\n")


if __name__ == "__main__":
    main(
        sys.argv[1],
        str(Path(sys.argv[2]).resolve()),
        str(Path(sys.argv[3]).resolve()),
        int((*sys.argv[4:], 6)[0]),
    )
