"""With which parameters TRL has its tokens drawn, by its own settings: what an engine is asked for, and blame is told."""

from typing import Any

from zerodrift.core.request import SHAPING, SamplingParams


def drawn_with(trainer: Any) -> SamplingParams | None:
    """As `trainer.args` has it; None where generation_kwargs ask for something that has no name here."""
    args = trainer.args
    more = dict(args.generation_kwargs or {})
    if not more.keys() <= {*SHAPING}:
        return None
    told = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        **more,
    }
    # vLLM and transformers write "all of them" as -1, 0 or None, and "no floor" as None.
    told["top_k"] = max(0, told["top_k"] or 0)
    told["min_p"] = told["min_p"] or 0.0
    return SamplingParams(max_tokens=args.max_completion_length, **told)
