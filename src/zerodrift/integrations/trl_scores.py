"""Logprobs of tokens that transformers' `generate` draws: TRL asks for none where the trainer generates by itself."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recorded(model: Any) -> Iterator[list[torch.Tensor]]:
    """While it lasts, every `model.generate` leaves its tokens' logprobs, [sequence, token], in the list.

    They are of the distribution that was drawn from: scores after temperature, top-k and the rest.
    """
    found: list[torch.Tensor] = []
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        config = copy.deepcopy(kwargs["generation_config"])
        config.return_dict_in_generate = config.output_scores = True
        answer = original(*args, **{**kwargs, "generation_config": config})
        tokens = answer.sequences[:, -len(answer.scores) :]
        found.append(
            torch.cat(
                [
                    scores.float().log_softmax(-1).gather(1, tokens[:, place : place + 1])
                    for place, scores in enumerate(answer.scores)
                ],
                dim=1,
            ).cpu()
        )
        return answer.sequences

    own = vars(model).get("generate")
    model.generate = generate
    try:
        yield found
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def rows(found: list[torch.Tensor], completion_ids: list[list[int]]) -> list[list[float]]:
    """One list per completion, as long as what TRL keeps of it: up to its end token."""
    assert len(found) == 1, f"one generation was expected, and {len(found)} were made"
    return [row[: len(ids)].tolist() for row, ids in zip(found[0], completion_ids, strict=True)]
