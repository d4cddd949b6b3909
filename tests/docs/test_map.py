"""Every path in docs/map.md is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"`((?:[a-z0-9_]+/)+(?:[a-z0-9_]+\.(?:py|yaml))?)`")


def missing(text: str) -> list[str]:
    named = PATH.findall(text)
    assert named, "no path is named"
    return [
        path for path in named if not ((ROOT / "src/zerodrift" / path).exists() or (ROOT / path).exists())
    ]


def test_every_path_in_the_map_exists() -> None:
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert len(PATH.findall(text)) > 50
    assert not missing(text)


def test_a_path_that_is_gone_is_seen() -> None:
    assert missing("`cli/audit.py` and `cli/gone.py`, `nowhere/`") == ["cli/gone.py", "nowhere/"]
