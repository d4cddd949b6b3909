"""One case in a terminal: its tokens with both sides' numbers."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.records.case import Case
from zerodrift.view.notation import number
from zerodrift.view.visible import visible


def print_replayed(
    case: Case, tokens: Sequence[tuple[int, float, float]], problem: str, console: Console
) -> None:
    """`tokens` are (id, reported, contracted); `problem` says why there are none."""
    console.print(Text(f"{case.says}; a token is wrong beyond {number(case.limit)} nats"))
    console.print(Text(f"prompt {visible(str(list(case.requests[0].prompt.token_ids)))}"), soft_wrap=True)
    if problem:
        console.print(Text(visible(problem), style="red"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("token", "engine", "reference", "Δ", ""):
        table.add_column(header, justify="right")
    for token, reported, contracted in tokens:
        delta = contracted - reported
        wrong = not abs(delta) <= case.limit
        table.add_row(
            str(token),
            f"{reported:.6f}",
            f"{contracted:.6f}",
            Text(f"{delta:+.2g}", style="red" if wrong else ""),
            Text("wrong", style="red") if wrong else Text("right", style="green"),
        )
    console.print(table)
