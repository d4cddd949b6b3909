"""`zerodrift bench`: how fast is the exact engine here, beside itself without exactness and beside another?"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from zerodrift.cli import console
from zerodrift.cli.audit import options_of
from zerodrift.cli.bar import Bar
from zerodrift.cli.console import JsonOption
from zerodrift.core.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerodrift.backends.base import Backend
    from zerodrift.bench.throughput import Contender, Spread, Standing
    from zerodrift.config.run import RunConfig

LOGS = Path("runs/bench")
MOST_REQUESTS = 10_000
"""Held in memory, with their answers: 99,999,999,999 took 12 GB in ten minutes and were not all made by then."""


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint directory or testbed:NAME.")
    ] = "testbed:qwen3",
    engine: Annotated[str | None, typer.Option(help="Who else takes part; as in an audit.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of its server.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting of it, as engine.key=value. Repeatable.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests that are served together.")
    ] = 64,
    shorten: Annotated[
        int, typer.Option(min=1, help="Divide all lengths by this, for a quick look at the same mixture.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each; medians and extremes are over them.")
    ] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Of this process; default: what torch takes here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the same requests by several engines in turns, and compare.

    Requests have 16 to 256 prompt tokens and as many to generate, with a
    logprob for every token. Ratios are taken within a round, where all met
    the same machine; if others use it too, trust the ratio of processor
    times, with --threads 1. Those who take part:

    exact          the engine, bit-exact
    unconstrained  the same engine over plain ops, twice: with our packed
                   linears and with torch's
    ENGINE         with --engine: any that can be audited, over HTTP

    Sixty-four requests take minutes per round; begin with short ones:

    $ zerodrift bench ./model --shorten 8
    $ zerodrift bench ./model --engine vllm --url http://127.0.0.1:8000
    """
    from zerodrift.config.load import load

    if strange := [text for text in settings or [] if not text.lstrip().startswith("engine.")]:
        raise ConfigError(
            f"--set {strange[0]} would change nothing here: only settings of the engine are read"
        )
    resolved = load(None, settings or [], options_of(model=model, engine=engine, url=url))
    with _other(resolved, requests, named=engine is not None) as other, Bar() as bar:
        setup, standings = _measure(bar, other, model, (requests, shorten, rounds, threads))
    if as_json:
        console.say_json({"schema": 2, **setup, "standings": standings})
    else:
        console.stdout().print(_table(setup, standings))


def _measure(
    bar: Bar, other: "Backend | None", model: str, how: tuple[int, int, int, int | None]
) -> "tuple[dict[str, Any], tuple[Standing, ...]]":
    import torch

    from zerodrift import models
    from zerodrift.bench.throughput import EXACT, PLAIN_OPS, AuditedEngine, OurEngine, compare, mixed

    requests, shorten, rounds, threads = how
    if threads is not None:
        torch.set_num_threads(threads)
    bar.stage("load")
    vanilla = models.load(model)
    config = vanilla.config
    asked = partial(mixed, requests, config.vocab_size, config.max_position_embeddings, shorten)
    first = asked()  # what cannot be asked is refused before engines are made
    contenders: list[Contender] = [OurEngine(name, vanilla) for name in (EXACT, *PLAIN_OPS)]
    if other is not None:
        contenders.append(AuditedEngine(other))
    bar.stage("measure")
    standings = compare(contenders, rounds, lambda turn: asked(turn=turn), bar.step)
    setup: dict[str, Any] = {"model": model, "threads": torch.get_num_threads(), "requests": requests}
    setup |= {"rounds": rounds, "prompt_tokens": sum(len(each.prompt.token_ids) for each in first)}
    return setup | {"output_tokens": sum(each.sampling.max_tokens for each in first)}, standings


def _other(config: "RunConfig", requests: int, *, named: bool) -> "AbstractContextManager[Backend | None]":
    """The engine beside ours, where one is named."""
    from zerodrift.backends.registry import IN_PROCESS, ServedModel, check_engine, open_engine
    from zerodrift.config.run import EXACT
    from zerodrift.models.spec import builtin_name

    model, engine = config.model.path or "", config.engine
    if not named:
        if engine != EXACT:
            raise ConfigError("--url and engine settings are those of another engine; name it: --engine vllm")
        return nullcontext()
    if engine.name == "exact":
        raise ConfigError("the exact engine takes part anyway; --engine names another")
    check_engine(engine)
    if engine.name not in IN_PROCESS:
        if engine.url is None and builtin_name(model) is not None:
            raise ModelNotFound(f"{engine.name} loads weights from a directory: name one as MODEL")
        engine = msgspec.structs.replace(engine, concurrency=requests)
    return open_engine(engine, ServedModel(model, "float32"), LOGS)


def _table(setup: dict[str, Any], standings: "tuple[Standing, ...]") -> Table:
    table = Table(
        *("contender", "tokens/s", "exact is × as fast", "by processor time"),
        title="{model}, fp32, {threads} threads: {requests} requests, {prompt_tokens} tokens in, {output_tokens} out, "
        "{rounds} rounds".format_map(setup),
    )
    for each in standings:
        ratios = (_range(ratio, ".2f") for ratio in (each.ratio, each.processor_ratio))
        table.add_row(each.name, _range(each.speed, ".1f"), *ratios)
    return table


def _range(value: "Spread | None", how: str) -> str:
    return "" if value is None else f"{value.median:{how}} ({value.low:{how}}–{value.high:{how}})"
