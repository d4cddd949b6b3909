"""`zerodrift demo`: faults of the story everyone knows, planted and found. Nothing in the table is written down."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Column, Table

from zerodrift.cli import console
from zerodrift.cli.bar import Bar

if TYPE_CHECKING:
    from zerodrift.records.verdict import VerdictRecord


class Scene(NamedTuple):
    """One audit of the demonstration."""

    planted: str
    """In words; `nothing` where the engine is healthy."""
    expected: str | None
    """The principal cause that must be named; None where the verdict must be PASS."""
    settings: tuple[str, ...] = ()
    fault: str | None = None
    sync: bool = False
    resets_cache: bool = True


SMALL = ("validation.num_prompts=24", "validation.equivalence_trials=24", "validation.max_tokens=16")
COOL = "sampling_defaults.temperature=0.7"

BUILT_IN = (
    Scene("nothing", None, (COOL,)),
    Scene("raw logprobs", "semantic/raw-logprobs", (COOL,), fault="semantic/raw-logprobs"),
    Scene(
        "prefix cache kept over a weight update",
        "weights/stale-prefix-cache",
        (COOL, "engine.name=reference"),
        fault="weights/stale-prefix-cache",
        sync=True,
        resets_cache=False,
    ),
    Scene("output head in bf16", "path/head-precision", (COOL,), fault="path/head-precision"),
)

_VLLM = (
    COOL,
    "engine.name=vllm",
    "model.dtype=float32",
    "engine.enforce_eager=true",
    "engine.max_model_len=1024",
    # A prefill in chunks with a seed ends vLLM's CPU worker: no step is so long.
    "engine.max_num_batched_tokens=8192",
    "engine.async_scheduling=null",
    "engine.enable_prefix_caching=true",
    "engine.env={VLLM_CPU_ATTN_SPLIT_KV: '0'}",
)
REAL_VLLM = (
    Scene(
        "vLLM's default logprobs mode", "semantic/raw-logprobs", (*_VLLM, "engine.logprobs_mode=raw_logprobs")
    ),
    Scene("the fix it printed; update with cache reset", None, _VLLM, sync=True),
    Scene("update without cache reset", "weights/stale-prefix-cache", _VLLM, sync=True, resets_cache=False),
)


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    vllm: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Interpreter of an environment with vLLM to use instead."),
    ] = None,
) -> None:
    """Plant three faults of the vLLM V0 to V1 story, and see them found.

    Takes less than a minute on a built-in model. With a real vLLM server the
    faults are its own defaults; each start takes about half a minute.

    $ zerodrift demo
    $ zerodrift demo --vllm .engines/vllm-0.32.0/bin/python
    """
    from zerodrift.core.cause import CAUSES

    scenes = BUILT_IN if vllm is None else REAL_VLLM
    extra = () if vllm is None else (f"engine.python={vllm}",)
    table = Table("planted", "verdict", Column("found", no_wrap=True))
    failures = 0
    with tempfile.TemporaryDirectory(prefix="zerodrift-demo-") as folder, Bar() as bar:
        for number, scene in enumerate(scenes):
            bar.part = f"{number + 1}/{len(scenes)} "
            bar.stage("start")
            record = _audit(scene, extra, Path(folder) / str(number), bar)
            failures += _add(table, scene, record)
    console.stdout().print(table)
    # Below the table, whole: a command that is broken over cells cannot be copied.
    for cause in dict.fromkeys(scene.expected for scene in scenes if scene.expected):
        console.say(f"{cause}, on vLLM:\n    {CAUSES[cause].fix('vllm')}")
    if failures:
        console.complain("demo", f"{failures} of {len(scenes)} scenes did not end as they must")
        raise typer.Exit(1)


def _audit(scene: Scene, extra: tuple[str, ...], directory: Path, bar: Bar) -> "VerdictRecord":
    from zerodrift.audit.session import Session
    from zerodrift.config.load import load
    from zerodrift.faults.registry import resolve

    session = Session(
        config=load(None, [*SMALL, *scene.settings, *extra]),
        directory=directory,
        sync=scene.sync,
        resets_cache=scene.resets_cache,
        wrap=None if scene.fault is None else resolve(scene.fault).inject,
    )
    return session.run(bar).record


def _add(table: Table, scene: Scene, record: "VerdictRecord") -> bool:
    """Add a row, and say whether the scene failed."""
    principal = record.to_fix[0].cause if record.to_fix else None
    style = {"PASS": "green", "FAIL": "red"}.get(record.verdict, "yellow")
    table.add_row(scene.planted, f"[{style}]{record.verdict}[/]", principal or "–")
    return record.verdict != ("PASS" if scene.expected is None else "FAIL") or principal != scene.expected
