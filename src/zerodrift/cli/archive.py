"""`zerodrift archive`: the batches that a training run kept, from the list of them down to single tokens."""

from pathlib import Path
from typing import Annotated

import typer

from zerodrift.cli import console
from zerodrift.records.archived import BatchState

app = typer.Typer(no_args_is_help=True, help="Look into the batches that a training run kept.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Archive directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="For a program: JSON; NaN is null.")]


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
@app.command("ls")
def ls(
    directory: Directory,
    state: Annotated[BatchState | None, typer.Option(help="Only batches that were found to be so.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps, both ends included.")
    ] = None,
    removed: Annotated[bool, typer.Option("--removed", help="What is no longer there, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which batches are there, of which step, and why?

    Suspect batches (warn, quarantine, halt) are kept whole, and of healthy
    ones a few, to compare with. A line begins with the name of the batch; the
    first characters of it are enough for `show`. Reads the index alone, also
    while training writes to the archive. With --json, one object a line.

    $ zerodrift archive ls runs/archive
    $ zerodrift archive ls runs/archive --state quarantine --steps 100:120
    """
    import msgspec

    from zerodrift.cli.blame import step_range
    from zerodrift.records.archive.index import Query
    from zerodrift.records.archive.reader import ArchiveReader
    from zerodrift.view.archive import print_entries, print_removed

    first, last = step_range(steps)
    query = Query(state=state, first=first, last=last)
    reader = ArchiveReader(directory)
    if as_json:
        for entry in reader.removed(query) if removed else reader.entries(query):
            console.say(msgspec.json.encode(entry).decode())
    elif removed:
        print_removed(reader.removed(query), console.stdout())
    else:
        print_entries(reader.entries(query), reader.removed(query), console.stdout())


@app.command("show")
def show(
    directory: Directory,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Its name, or the first characters of it.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Every token of every rollout.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is in one batch?

    Its rollouts, a line each: lengths, reward, where it came from, which
    weights made it, and how far the engine's logprobs are from the trainer's.
    With --tokens every number that was known of every token. With --json the
    whole batch, as blame reads it.

    $ zerodrift archive show runs/archive 3f2a9c01
    $ zerodrift archive show runs/archive 3f2a9c01 --tokens
    """
    import msgspec

    from zerodrift.records.archive.reader import ArchiveReader
    from zerodrift.view.archive import print_batch, print_tokens

    reader = ArchiveReader(directory)
    entry = reader.find(batch)
    content = reader.read(entry)
    if as_json:
        console.say(msgspec.json.encode(content).decode())
        return
    out = console.stdout()
    print_batch(entry, content, reader.place(entry), out)
    for rollout in content.rollouts if tokens else ():
        print_tokens(rollout, out)


@app.command("gradient")
def gradient(
    directory: Directory,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Its name, or the first characters of it.")],
    model: Annotated[str, typer.Option(help="Checkpoint that made the tokens, or testbed:NAME.")],
    epsilon: Annotated[float, typer.Option(help="The trainer's clip: ratios within 1 ± ε.")] = 0.2,
    epsilon_high: Annotated[float | None, typer.Option(help="Its upper side, where that is another.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="What the trainer divides logits by, where the archive has none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is this gap safe? What would it do to the step?

    The gradient of GRPO's clipped objective over the batch, once by the
    logprobs that the engine reported and once by those that the checkpoint
    gives the same tokens: cosine, length, and tokens that are clipped
    otherwise, for the whole and by position and log p; and beside it how far
    chance moves the gradient. Advantages come from the rewards in the
    archive, by prompt; without them it refuses. Needs no server.

    $ zerodrift archive gradient runs/archive 3f2a9c01 --model ./step-100
    """
    import msgspec

    from zerodrift.audit.gradient.compare import compare
    from zerodrift.records.archive.reader import ArchiveReader
    from zerodrift.view.gradient import print_gradient

    reader = ArchiveReader(directory)
    content = reader.read(reader.find(batch))
    found = compare(content, model, epsilon=epsilon, epsilon_high=epsilon_high, temperature=temperature)
    if as_json:
        console.say(msgspec.json.encode(found).decode())
    else:
        print_gradient(found, console.stdout())


@app.command("verify")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Is every batch as it was written?

    Reads all of it: segments against the digests they were sealed with, and
    each batch against its own. What is damaged is named with its file; all
    else stays readable. `unfinished` is what the next writer puts in order,
    as after a kill. Exit code: 0 sound, 1 something is damaged.

    $ zerodrift archive verify runs/archive
    """
    import msgspec

    from zerodrift.records.archive.reader import ArchiveReader
    from zerodrift.view.archive import print_verified

    reader = ArchiveReader(directory)
    findings, unfinished = list(reader.findings()), list(reader.unfinished())
    if as_json:
        told = {"batches": len(reader.entries()), "damaged": findings, "unfinished": unfinished}
        console.say(msgspec.json.encode(told).decode())
    else:
        print_verified(directory, reader.entries(), findings, unfinished, console.stdout())
    raise typer.Exit(1 if findings else 0)
