"""What a gap does to a gradient, in a terminal."""

from rich.console import Console
from rich.text import Text

from zerodrift.records.gradient import GradientPart, GradientRecord
from zerodrift.view.notation import count, number, share

UNKNOWN = "–"
HEADERS = ("tokens", "count", "mean |Δ|", "cosine", "length", "clipped otherwise")


def print_gradient(record: GradientRecord, console: Console) -> None:
    """The sentence first, then the numbers behind it."""
    console.print(Text(record.message, style="bold"))
    console.print()
    rows = [HEADERS, *(_row(part) for part in (record.whole, *record.parts))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADERS))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        console.print(Text(line, style="dim" if row is HEADERS else ""), soft_wrap=True)
    console.print()
    clip = f"[{number(1 - record.epsilon_low)}, {number(1 + record.epsilon_high)}]"
    console.print(
        Text(
            f"step {record.step}: {count(record.rollouts)} rollouts in {count(record.groups)} groups, "
            f"{count(record.without_advantage)} of them without an advantage; ratios clipped to {clip}"
        ),
        soft_wrap=True,
    )
    for each in record.assumed:
        console.print(Text(f"assumed: {each}", style="dim"), soft_wrap=True)


def _row(part: GradientPart) -> tuple[str, ...]:
    name = "all" if part.kind == "all" else f"{part.kind} {part.label}"
    return (
        name,
        count(part.tokens),
        number(part.mean_abs),
        UNKNOWN if part.cosine is None else f"{part.cosine:.4f}",
        UNKNOWN if part.norm_ratio is None else f"×{number(part.norm_ratio)}",
        share(part.clip_changed),
    )
