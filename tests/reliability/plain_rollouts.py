"""Rollouts as plain transformers records them, with nothing of zerodrift in the way: `model.generate`, then a softmax.

A line is what people write at night: ids, logprobs of the distribution that was sampled from, step and parameters.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

QUESTIONS = (
    "What is a prime number?",
    "Name three rivers of Europe and say where each of them ends.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Why is the sky blue? Explain it to a child in a few sentences.",
    "Give me a recipe for bread with four ingredients.",
    "What did the Romans use concrete for?",
    "Tell me a joke about a cat.",
)
Row = dict[str, Any]


def prompts(
    tokenizer: Any, questions: Sequence[str] = QUESTIONS, system: str | None = None
) -> list[list[int]]:
    """Prompt ids by the tokenizer's own template."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [
        tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for question in questions
    ]


@torch.no_grad()
def rollouts(
    model: Any,
    asked: Sequence[Sequence[int]],
    *,
    seed: int,
    tokens: int = 32,
    temperature: float = 1.0,
    top_p: float = 1.0,
    step: int = 0,
) -> list[Row]:
    """One sample of each prompt, all in one batch that is padded on the left."""
    torch.manual_seed(seed)
    longest, pad = max(map(len, asked)), model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(each)) + list(each) for each in asked])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in asked])
    answer = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=temperature,
        top_p=top_p,
        top_k=0,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = torch.stack(answer.scores, dim=1).float().log_softmax(dim=-1)
    drawn = answer.sequences[:, longest:]
    numbers = scores.gather(-1, drawn[..., None])[..., 0]
    rows = []
    for prompt, output, logprobs in zip(asked, drawn.tolist(), numbers.tolist(), strict=True):
        end = output.index(pad) + 1 if pad in output else len(output)
        rows.append(
            {
                "step": step,
                "prompt_token_ids": list(prompt),
                "token_ids": output[:end],
                "logprobs": logprobs[:end],
                "sampling": {"temperature": temperature, "top_p": top_p},
            }
        )
    return rows


def write(path: Path, rows: Iterable[Row]) -> Path:
    """One line for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
