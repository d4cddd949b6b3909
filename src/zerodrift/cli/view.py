"""`zerodrift view`: the live page of a training, or the report of an audit, in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from zerodrift.cli import console
from zerodrift.core.errors import ConfigError
from zerodrift.view.visible import visible

PORT = 8377
_NAMED = 3
"""Things of a directory that a refusal names."""


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What Monitor(directory=DIR) writes, an archive, or an audit's run."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is asked for.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a token of your own, in place of a new one.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name that browsers reach it by.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="DIR, or a run in it, may come later: the page waits.")
    ] = False,
) -> None:
    """Watch a training in a browser, while it runs or afterwards.

    Mismatch, staleness and update side by side, ESS, clip rate, entropy,
    reward with its baseline, lag, the breaker's history, and the batches that
    were kept back, down to tokens. New steps appear by themselves. What a run
    cannot show is called not observable, and never drawn as 0.

    In the training script (or attach(trainer, directory="runs/train") of
    zerodrift.integrations.trl), then here; before DIR is there, with --wait:

    monitor = zerodrift.Monitor(directory="runs/train")

    $ zerodrift view runs/train
    $ zerodrift view runs/audit-20261116-181500

    On a training node: ssh -L 8377:localhost:8377 NODE, and open
    http://localhost:8377. Without ssh, beyond this machine and unencrypted:

    $ zerodrift view runs/train --host 0.0.0.0
    """
    from zerodrift.view.live.access import Access, token_for
    from zerodrift.view.live.server import open_server
    from zerodrift.web.access import is_loopback, names_of

    _check(directory, may_come=wait)
    token = token_for(host, token_file)
    try:
        server = open_server(directory, host, port, Access(names_of(host, allow_host or ()), token))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); --port 0 takes a free one"
        ) from error
    if (missing := _missing(directory)) is not None:
        console.note(f"{directory} {missing}; the page begins by itself with the first step of a training")
    if not is_loopback(host):
        console.note("the page is not encrypted: whoever reads the network reads it, and its token")
    console.say(f"{_address(host, server.server_port, token)}   (Ctrl-C ends it; training goes on)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass  # how it is meant to end
    finally:
        server.feed.close()
        server.server_close()


def _check(directory: Path, *, may_come: bool) -> None:
    """Refuse what no page can be made of; a wrong name would otherwise be waited for without an end."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; name the directory that it is in")
    if may_come:
        return
    if not directory.exists():
        raise ConfigError(
            f"there is no directory {directory}; name one that Monitor(directory=…), an archive or an audit wrote, "
            "or add --wait if its training has still to start"
        )
    held = _names(directory)
    if held and not _is_run(directory):
        more = f" and {len(held) - _NAMED:,} more" if len(held) > _NAMED else ""
        raise ConfigError(
            f"{directory} holds nothing that Monitor(directory=…), an archive or an audit writes, but {', '.join(held[:_NAMED])}{more}; "
            "name such a directory, or add --wait if a training is about to write here"
        )


def _missing(directory: Path) -> str | None:
    """What there is not to be shown yet; None where there is something."""
    if not directory.exists():
        return "is not there yet"
    if _is_run(directory):
        return None
    return "holds no run yet" if _names(directory) else "is empty"


def _names(directory: Path) -> list[str]:
    try:
        return sorted(visible(path.name) for path in directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read ({error.strerror})") from error


def _is_run(directory: Path) -> bool:
    """Whether a monitor, a sink, an archive, a training or an audit has begun here."""
    from zerodrift.monitor.directory import ARCHIVE, RANKS, STATE, STEPS
    from zerodrift.monitor.writer import LOCK
    from zerodrift.records.archive.layout import is_archive
    from zerodrift.records.directory import CONFIG, VERDICT

    begun = (ARCHIVE, LOCK, STATE, STEPS, CONFIG, VERDICT)
    return (
        any((directory / name).exists() for name in begun)
        or is_archive(directory)
        or any(directory.glob(f"{RANKS}/{STEPS}"))
    )


def _address(host: str, port: int, token: str | None) -> str:
    """To be opened; a wildcard is replaced by this machine's name."""
    import socket

    from zerodrift.web.access import WILDCARDS

    name = socket.gethostname() if host in WILDCARDS else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
