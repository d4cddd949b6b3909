"""`zerodrift bench`: how fast is the exact engine here, beside itself without exactness and beside vLLM?"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.core.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from zerodrift.bench.throughput import Contender, Spread, Standing

LOG = Path("runs/bench/vllm.log")


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or testbed:NAME.")] = "testbed:qwen3",
    requests: Annotated[int, typer.Option(min=1, help="Requests that are served together.")] = 64,
    shorten: Annotated[
        int, typer.Option(min=1, help="Divide all lengths by this, for a quick look at the same mixture.")
    ] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each; medians and extremes are over them.")
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads for everybody; default: what torch takes here."),
    ] = None,
    vllm: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Interpreter of an environment with vLLM.")
    ] = None,
    vllm_eager: Annotated[
        bool, typer.Option("--vllm-eager", help="Let vLLM run op by op; compiling takes minutes.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, writable=True, help="Write all numbers here, too."),
    ] = None,
) -> None:
    """Serve the same requests by several engines in turns, and compare.

    Requests have 16 to 256 prompt tokens and as many to generate, always the
    same ones, with a logprob for every token. Ratios are taken within a round,
    where all met the same machine; if others use it too, trust the ratio of
    processor times, with --threads 1. Those who take part:

    exact          the engine, bit-exact
    unconstrained  the same engine over plain ops, twice: with our packed
                   linears and with torch's
    vllm           with --vllm: its offline LLM, in its own environment

    Sixty-four requests take minutes per round; begin with short ones:

    $ zerodrift bench ./model --shorten 8
    $ zerodrift bench ./model --vllm .engines/vllm-0.32.0/bin/python
    """
    import torch

    from zerodrift import models
    from zerodrift.bench.contenders import PLAIN_OPS, EngineContender
    from zerodrift.bench.throughput import EXACT, compare, mixed

    _check_vllm(vllm, model)
    if threads is not None:
        torch.set_num_threads(threads)
    contenders: list[Contender] = []
    with Bar() as bar:
        try:
            bar.stage("load")
            vanilla = models.load(model)
            config = vanilla.config
            jobs = mixed(requests, config.vocab_size, config.max_position_embeddings, shorten)
            for name in (EXACT, *PLAIN_OPS):
                bar.stage(f"prepare {name}")
                contenders.append(EngineContender(name, vanilla))
            if vllm is not None:
                bar.stage("start vllm")
                contenders.append(_vllm(vllm, model, threads=torch.get_num_threads(), eager=vllm_eager))
            bar.stage("measure")
            standings = compare(contenders, jobs, rounds, bar.step)
        finally:
            for contender in contenders:
                contender.close()
    setup: dict[str, Any] = {"model": model, "threads": torch.get_num_threads()}
    setup |= {"requests": requests, "rounds": rounds}
    setup |= {"prompt_tokens": sum(len(job.prompt) for job in jobs)}
    setup |= {"output_tokens": sum(job.num_tokens for job in jobs)}
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode({"schema": 2, **setup, "standings": standings})
        json.write_bytes(msgspec.json.format(content) + b"\n")
    console.stdout().print(_table(setup, standings))


def _check_vllm(python: str | None, model: str) -> None:
    from zerodrift.models.spec import builtin_name

    if python is None:
        return
    if shutil.which(python) is None:
        raise ConfigError(f"--vllm {python} is no program that can be run; `make engines` installs one")
    if builtin_name(model) is not None:
        raise ModelNotFound("vLLM loads weights from a directory: name one as MODEL")


def _vllm(python: str, model: str, *, threads: int, eager: bool) -> "Contender":
    from zerodrift.bench.contenders import VllmContender
    from zerodrift.models.spec import directory_of

    return VllmContender(python, directory_of(model).resolve(), LOG, threads=threads, eager=eager)


def _table(setup: dict[str, Any], standings: "tuple[Standing, ...]") -> Table:
    table = Table(
        title="{model}, fp32, {threads} threads: {requests} requests, {prompt_tokens} tokens in, {output_tokens} out, "
        "{rounds} rounds".format_map(setup)
    )
    for heading in ("contender", "tokens/s", "exact is × as fast", "by processor time", "setting"):
        table.add_column(heading)
    for each in standings:
        numbers = _range(each.speed, ".1f"), _range(each.ratio, ".2f"), _range(each.processor_ratio, ".2f")
        table.add_row(each.name, *numbers, each.setting)
    return table


def _range(value: "Spread | None", how: str) -> str:
    return "" if value is None else f"{value.median:{how}} ({value.low:{how}}–{value.high:{how}})"
