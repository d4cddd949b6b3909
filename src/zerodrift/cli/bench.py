"""`zerodrift bench`: how fast is the exact engine here, beside others, and under load?"""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from zerodrift.cli import console
from zerodrift.cli.bar import Bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerodrift.bench.contender import Contender
    from zerodrift.bench.load import Load
    from zerodrift.bench.throughput import Spread, Throughput
    from zerodrift.bench.workload import Job

app = typer.Typer(no_args_is_help=True, help="Measure the exact engine beside others, and under load.")
LOG = Path("runs/bench/vllm.log")


class ContenderName(StrEnum):
    """Who can take part, in the order of turns."""

    EXACT = "exact"
    UNCONSTRAINED = "unconstrained"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


Model = Annotated[
    str | None,
    typer.Argument(
        help="Directory or testbed:NAME; default: .cache/smollm2, else its shape with random weights."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each; medians and extremes are over them.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Threads for everybody; default: what torch takes here.")
]
Json = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write all numbers here, too.")
]


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
@app.command("throughput")
def throughput(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests that are served together.")] = 64,
    shorten: Annotated[
        int, typer.Option(min=1, help="Divide all lengths by this, for a quick look at the same mixture.")
    ] = 1,
    rounds: Rounds = 3,
    only: Annotated[
        list[ContenderName] | None, typer.Option(help="Who takes part; may be repeated. Default: everybody.")
    ] = None,
    threads: Threads = None,
    vllm: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Interpreter of an environment with vLLM.")
    ] = None,
    vllm_eager: Annotated[
        bool, typer.Option("--vllm-eager", help="Let vLLM run op by op; compiling takes minutes.")
    ] = False,
    json: Json = None,
) -> None:
    """Serve the same requests by several engines in turns, and compare.

    Requests have 16 to 256 prompt tokens and as many to generate, always the
    same ones, with a logprob for every token. Ratios are taken within a round,
    where all met the same machine; if others use it too, trust the ratio of
    processor times, with --threads 1. Those who take part:

    exact          the engine, bit-exact
    unconstrained  the same engine over the faster of two sets of plain ops
    transformers   generate, at the best of several batch sizes
    vllm           with --vllm: its offline LLM, in its own environment

    Sixty-four requests take minutes per round; begin with short ones:

    $ zerodrift bench throughput --shorten 8
    $ zerodrift bench throughput --vllm .engines/vllm-0.32.0/bin/python
    $ zerodrift bench throughput --only exact --only unconstrained --json it.json
    """
    from zerodrift.bench import shape, workload
    from zerodrift.bench.throughput import Setup, compare

    wanted = _wanted(only, vllm)
    used = _use_threads(threads)
    spec = shape.default_directory() if model is None else model
    contenders: list[Contender] = []
    with Bar() as bar:
        try:
            bar.stage("load")
            vanilla = shape.load(spec)
            config = vanilla.config
            jobs = workload.mixed(requests, config.vocab_size, config.max_position_embeddings)
            jobs = workload.shortened(jobs, shorten)
            for name in wanted:
                bar.stage(f"prepare {name}")
                contenders.append(
                    _vllm(vllm, spec, used, vllm_eager)
                    if name is ContenderName.VLLM
                    else _local(name, vanilla, jobs)
                )
            bar.stage("measure")
            setup = Setup(model=str(spec or shape.RANDOM), threads=used, rounds=rounds)
            found = compare(contenders, jobs, setup, bar.step)
        finally:
            for contender in contenders:
                contender.close()
    _write(json, found)
    console.stdout().print(_standings(found))


@app.command("load")
def load(model: Model = None, rounds: Rounds = 3, threads: Threads = None, json: Json = None) -> None:
    """Cost of a token at 1 to 256 requests at once, and memory of the KV.

    At 256 a token may cost at most 1.1 times what it costs at the cheapest
    load; planning and bookkeeping may take at most 5 % of a step there; and
    keys and values may take 5 % more or less memory than arithmetic says.

    $ zerodrift bench load
    $ zerodrift bench load --rounds 1 --threads 2 --json load.json
    """
    from zerodrift.bench import load as bench
    from zerodrift.bench import shape

    used = _use_threads(threads)
    spec = shape.default_directory() if model is None else model
    with Bar() as bar:
        bar.stage("load")
        vanilla = shape.load(spec)
        kv = bench.measure_kv(vanilla)
        bar.stage("measure")
        costs = bench.measure_costs(vanilla, rounds, bar.step)
    found = bench.Load(model=str(spec or shape.RANDOM), threads=used, rounds=rounds, costs=costs, kv=kv)
    _write(json, found)
    _tell_load(found)


def _wanted(only: "Sequence[ContenderName] | None", vllm: str | None) -> list[ContenderName]:
    """In the order of turns."""
    from zerodrift.core.errors import ConfigError

    if only and (ContenderName.VLLM in only) is (vllm is None):
        raise ConfigError(
            "--only vllm and --vllm PYTHON, the interpreter of an environment with vLLM, go together: with one of "
            "them alone vLLM would take no part"
        )
    if vllm is not None and shutil.which(vllm) is None:
        raise ConfigError(f"--vllm {vllm} is no program that can be run; `make engines` installs one")
    chosen = set(only or ContenderName) - (set() if vllm else {ContenderName.VLLM})
    return [name for name in ContenderName if name in chosen]


def _use_threads(threads: int | None) -> int:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _local(name: ContenderName, vanilla: Any, jobs: "Sequence[Job]") -> "Contender":
    from zerodrift.bench import generate, ours

    if name is ContenderName.TRANSFORMERS:
        return generate.GenerateContender(vanilla, jobs)
    return ours.exact(vanilla) if name is ContenderName.EXACT else ours.unconstrained(vanilla, jobs)


def _vllm(python: str | None, spec: "str | Path | None", threads: int, eager: bool) -> "Contender":
    from zerodrift.bench.vllm import Mode, Start, VllmContender
    from zerodrift.core.errors import ModelNotFound
    from zerodrift.models.spec import builtin_name, directory_of

    assert python is not None, "checked before"
    if spec is None or builtin_name(spec) is not None:
        raise ModelNotFound(
            "vLLM loads weights from a directory: run `make smollm2` first, or name a directory"
        )
    mode = Mode.EAGER if eager else Mode.COMPILED
    return VllmContender(Start(python, directory_of(spec).resolve(), threads, mode), LOG)


def _standings(found: "Throughput") -> Table:
    table = Table(
        title=f"{found.model}, fp32, {found.threads} threads: {found.requests} requests, {found.prompt_tokens} tokens in, "
        f"{found.output_tokens} out, {found.rounds} rounds"
    )
    for heading in ("contender", "tokens/s", "exact is × as fast", "by processor time", "target", "setting"):
        table.add_column(heading)
    for each in found.standings:
        reached = each.ratio is not None and each.target is not None and each.ratio.median >= each.target
        table.add_row(
            each.name,
            _range(each.speed, ".1f"),
            "" if each.ratio is None else _range(each.ratio, ".2f"),
            "" if each.processor_ratio is None else _range(each.processor_ratio, ".2f"),
            "" if each.target is None else f"[{'green' if reached else 'red'}]≥ {each.target:g}[/]",
            each.setting,
        )
    return table


def _tell_load(found: "Load") -> None:
    from zerodrift.bench.load import MOST_BOOKKEEPING, MOST_DEARER, MOST_KV_ERROR

    table = Table(title=f"{found.model}, fp32, {found.threads} threads, {found.rounds} rounds of decoding")
    for heading in ("requests", "ms per token", "× the cheapest", "by processor time", "bookkeeping"):
        table.add_column(heading, justify="right")
    for cost in found.costs:
        table.add_row(
            str(cost.concurrent),
            _range(cost.milliseconds_per_token, ".2f"),
            f"{cost.times_the_cheapest:.2f}",
            f"{cost.processor_times_the_cheapest:.2f}",
            f"{cost.bookkeeping:.1%}",
        )
    console.stdout().print(table)
    last, kv = found.costs[-1], found.kv
    console.say(
        f"at {last.concurrent}: {last.times_the_cheapest:.2f} × the cheapest (at most {MOST_DEARER:g}; by processor time "
        f"{last.processor_times_the_cheapest:.2f}), bookkeeping "
        f"{last.bookkeeping:.1%} of a step (at most {MOST_BOOKKEEPING:.0%})"
    )
    measured = (
        "not measured here"
        if kv.measured_bytes is None
        else f"{kv.measured_bytes / kv.arithmetic_bytes - 1:+.1%} of that (within {MOST_KV_ERROR:.0%})"
    )
    console.say(f"KV: {kv.arithmetic_bytes / 2**20:.1f} MiB by arithmetic, resident {measured}")


def _range(value: "Spread", how: str) -> str:
    return f"{value.median:{how}} ({value.low:{how}}–{value.high:{how}})"


def _write(path: Path | None, found: "Throughput | Load") -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
