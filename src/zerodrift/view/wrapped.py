"""Prose in a terminal that may be narrow."""

from rich.console import Console
from rich.text import Text


def print_wrapped(head: Text, prose: str, console: Console, style: str = "") -> None:
    """Behind `head`, its lines below each other however narrow the terminal."""
    for place, line in enumerate(Text(prose, style).wrap(console, max(1, console.width - head.cell_len))):
        line.rstrip()
        console.print(Text.assemble(Text(" " * head.cell_len) if place else head, line), soft_wrap=True)
