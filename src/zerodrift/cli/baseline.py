"""`zerodrift baseline`: record the reference, so that the ground truth is isolated from training."""

from pathlib import Path
from typing import Annotated

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.config.model import Device

app = typer.Typer(no_args_is_help=True, help="Record a reference to audit against later, or elsewhere.")


@app.command("record")
def record(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or testbed:NAME.")],
    out: Annotated[Path, typer.Option(help="File to write; an unfinished one is resumed.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt`, `prompt_token_ids` or `messages`; default: generated prompts."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts to record.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Tokens to sample per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="What the trainer samples at.")] = 1.0,
    device: Annotated[Device, typer.Option(help="Where the model computes.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Row i is sampled with seed + i.")] = 0,
) -> None:
    """Sample from vanilla transformers and keep tokens and logprobs.

    The file is bound to the weights by digest. A recording that was
    interrupted goes on where it stopped.

    $ zerodrift baseline record ./model --prompts prompts.jsonl --out base.jsonl
    """
    import_shown("zerodrift.audit.baseline")
    from zerodrift.audit.baseline import record as record_rows
    from zerodrift.audit.prompts import check_file, from_file, generated
    from zerodrift.backends.reference import ReferenceBackend
    from zerodrift.core.request import SamplingParams

    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    if prompts is not None:
        check_file(prompts)
    longest = _room(model, max_tokens, num_prompts)
    with Bar() as bar:
        bar.stage("load")
        reference = ReferenceBackend(model, device=device)
        vocab = reference.facts.vocab_size
        if prompts is None:
            chosen = generated(reference.tokenizer, vocab, min(longest, 512), num_prompts, seed)
        else:
            chosen = from_file(prompts, reference.tokenizer, longest, num_prompts, vocab)
        bar.stage("record")
        fresh = record_rows(reference, chosen, sampling, out, bar.step)
    console.say(f"{out}: {len(chosen)} rows ({fresh} new) of {model}, weights {reference.version.digest}")


def _room(model: str, max_tokens: int, num_prompts: int) -> int:
    """Tokens that a prompt may have; asked before the weights are read, which may take minutes."""
    from zerodrift.core.errors import InvalidPrompt, InvalidSampling
    from zerodrift.models.model_facts import facts

    if num_prompts < 1:
        raise InvalidPrompt(f"asked for {num_prompts} prompts; record at least one")
    context = facts(model).context_length
    if max_tokens >= context:
        raise InvalidSampling(
            f"max_tokens={max_tokens} leaves no room for a prompt in a context of {context}"
        )
    return context - max_tokens
