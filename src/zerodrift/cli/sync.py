"""`zerodrift sync`: which weights serve, which receipts vouch for them, and back to the version before."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerodrift.cli import console
from zerodrift.cli.console import JsonOption

if TYPE_CHECKING:
    from zerodrift.sync.ledger import ReceiptLedger
    from zerodrift.sync.receipt import Receipt

app = typer.Typer(no_args_is_help=True, help="Weight updates: what serves, what vouches for it, and back.")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Of an engine's versions, of receipts, or both.")
]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="The receipt key, a file of mode 0600.")]


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
@app.command("key")
def key(path: Annotated[Path, typer.Argument(metavar="FILE", help="Where none is yet.")]) -> None:
    """Make the key that receipts are sealed with.

    32 random bytes in a file that only you can read. Whoever has it can make
    receipts, so give it to the process that takes them and to the trainer
    that requires them, and to no engine.

    $ zerodrift sync key receipt.key
    """
    from zerodrift.sync.key import create_key

    create_key(path)
    console.say(f"made {path}, mode 0600")


@app.command("status")
def status(directory: Directory, key: Key = None, as_json: JsonOption = False) -> None:
    """Which weights serve, and does a receipt vouch for them?

    Of a directory of versions (`Updates`): the version that serves, and those
    that are kept and can be rolled back to. Of a directory of receipts, with
    --key: the last receipt of every replica and rank. Reads, and takes no
    lock: also while an engine runs. Exit code 1 if a receipt is not
    confirmed, since no rollout of that replica is accepted then.

    $ zerodrift sync status runs/weights
    $ zerodrift sync status runs/receipts --key receipt.key --json
    """
    from zerodrift.sync.judge import Arrival

    versions, receipts = _versions(directory), _last_receipts(directory, key)
    if not versions and not receipts:
        _nothing(directory, key)
    if as_json:
        console.say_json({"versions": versions, "receipts": receipts})
    else:
        for version in versions:
            serves = "serves" if version["serves"] else "kept"
            console.say(f"{serves:<8} {version['label']}  {str(version['digest'])[:12]}")
        for receipt in receipts:
            _say_receipt(receipt)
    if any(receipt.arrival is not Arrival.CONFIRMED for receipt in receipts):
        raise typer.Exit(1)


@app.command("verify")
def verify(
    directory: Directory,
    key: Annotated[Path, typer.Option(metavar="FILE", help="The receipt key, a file of mode 0600.")],
    rollouts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines of rollouts with the ids of their receipts."),
    ] = None,
) -> None:
    """Was every receipt sealed with this key, and may these rollouts be trained on?

    Reads every receipt in DIR, and refuses one that was edited, taken twice
    or sealed with another key. With --rollouts, also that every rollout
    carries a receipt, that the receipt says CONFIRMED, and that it is one of
    the weights which made the tokens. Exit code 1 at the first that fails.

    $ zerodrift sync verify runs/receipts --key receipt.key
    $ zerodrift sync verify runs/receipts --key receipt.key --rollouts batch.jsonl
    """
    from zerodrift.core.errors import NoReceipt

    try:
        _verified(directory, key, rollouts)
    except NoReceipt as error:
        # The gate that failed: what was asked could be judged.
        console.report(error, debug=False)
        raise typer.Exit(1) from error


@app.command("rollback")
def rollback(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of an engine's versions.")],
    expected: Annotated[str, typer.Option(help="The version that you believe is current.")],
    to: Annotated[str | None, typer.Option(help="A version that is kept; else the one before.")] = None,
) -> None:
    """Make an earlier version current again, for an engine that is stopped.

    The engine that is started over DIR next serves it, bit for bit. Refused
    while an engine runs over DIR (call its updates.rollback() then), where
    another version is current than --expected, and where the version that is
    asked for is not kept, or its weights were damaged: all of them are read.
    `zerodrift sync status DIR` shows both.

    $ zerodrift sync rollback runs/weights --expected "step 7"
    $ zerodrift sync rollback runs/weights --expected "step 7" --to "step 5"
    """
    from zerodrift.core.errors import ModelNotFound, VersionConflict
    from zerodrift.weights.folder import check_kept
    from zerodrift.weights.registry import LOG, Kind, Registry

    if not (directory / LOG).is_file():
        raise ModelNotFound(f"{directory} holds no {LOG}; give the directory that Updates was given")
    registry = Registry(directory)
    try:
        versions = registry.versions
        if versions.current != expected:
            raise VersionConflict(f"{expected!r} was expected to be current, and {versions.current!r} is")
        known = versions.to_go_back_to(to)
        check_kept(directory, known.manifest)
        registry.append(Kind.PUBLISHED, known.version, known.manifest, follows=expected, kv="recompute")
    finally:
        registry.close()
    console.say(f"current: {known.version.label}; the next engine over {directory} serves it")


def _verified(directory: Path, key: Path, rollouts: Path | None) -> None:
    from zerodrift.records.codec import read_lines
    from zerodrift.sync.ledger import require_receipt
    from zerodrift.sync.receipt import ReceiptedRollout

    ledger = _ledger(directory, key)
    if ledger is None or not ledger.receipts:
        _nothing(directory, key)
    assert ledger is not None
    console.say(f"{len(ledger.receipts)} receipts, all sealed with {key}")
    if rollouts is not None:
        let_in = require_receipt(read_lines(rollouts, ReceiptedRollout), ledger)
        console.say(f"{len(let_in)} rollouts, every token by weights that a receipt vouches for")


def _versions(directory: Path) -> list[dict[str, str | bool]]:
    """Versions that are kept, oldest first; none where the directory holds no engine's."""
    from zerodrift.weights.registry import LOG, Versions, read_log

    versions = Versions()
    for entry in read_log(directory / LOG) if (directory / LOG).is_file() else ():
        versions = versions.after(entry)
    return [
        {
            "label": label,
            "digest": versions.known[label].version.digest or "",
            "serves": label == versions.current,
        }
        for label in versions.kept
    ]


def _last_receipts(directory: Path, key: Path | None) -> "list[Receipt]":
    """The last of every replica and rank."""
    ledger = _ledger(directory, key)
    lasts = [] if ledger is None else [ledger.last(place) for place in ledger.places]
    return [receipt for receipt in lasts if receipt is not None]


def _ledger(directory: Path, key: Path | None) -> "ReceiptLedger | None":
    from zerodrift.sync.key import read_key
    from zerodrift.sync.ledger import ReceiptLedger

    return None if key is None else ReceiptLedger(directory, read_key(key))


def _nothing(directory: Path, key: Path | None) -> None:
    from zerodrift.core.errors import RecordError

    hint = "" if key is not None else "; receipts are read with --key"
    raise RecordError(f"{directory} holds no versions and no receipts{hint}")


def _say_receipt(receipt: "Receipt") -> None:
    rank = "" if receipt.rank is None else f" rank {receipt.rank}"
    cause = "" if receipt.cause is None else f" {receipt.cause}"
    console.say(f"{receipt.arrival:<12} {receipt.version.label} on {receipt.replica}{rank}{cause}")
    console.say(f"  {receipt.message}")
    console.say(f"  receipt {receipt.id[:16]}, {receipt.tokens} canary tokens, {receipt.seconds:.1f} s")
