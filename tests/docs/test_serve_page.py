"""The curl lines of docs/serve.md and of the README, run as they stand; `python test_serve_page.py` writes the answers anew."""

import itertools
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "serve"))

from serving import serve  # noqa: E402 (beside the tests of the server)

PAGE = ROOT / "docs" / "serve.md"
PAGES = (PAGE, ROOT / "README.md")
SHOWN = re.compile(r"```sh\n(curl .*?)\n```\n\n```json\n(.*?)\n```", re.DOTALL)


def settled(answer: str) -> str:
    """Without what differs from call to call."""
    answer = re.sub(r'"(cmpl|gen|score)-[0-9a-f]{32}"', r'"\1-…"', answer)
    return re.sub(r'"created":\d+', '"created":…', answer)


def rounded(answer: str) -> str:
    """The last bits are this machine's."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.3f}", answer)


def answer_to(line: str, port: int) -> str:
    words = shlex.split(line.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    return settled(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_answers_are_what_the_server_says(tmp_path):
    found = [SHOWN.findall(page.read_text()) for page in PAGES]
    assert [len(lines) for lines in found] == [4, 1]
    for server in serve(tmp_path):
        for line, shown in itertools.chain(*found):
            assert rounded(answer_to(line, server.port)) == rounded(shown)


def test_the_proof_is_one(tmp_path):
    """The second line of the page, without the token that it does not speak of; it asks for less, and needs to know as much."""
    (line,) = re.findall(r"^\$ zerodrift (audit .*)$", PAGE.read_text().partition("## ")[0], re.MULTILINE)
    few = ["--num-prompts", "8", "--trials", "8", "--out", str(tmp_path / "run")]
    for server in serve(tmp_path):
        words = [*shlex.split(line.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")), *few]
        ended = subprocess.run(
            [sys.executable, "-m", "zerodrift.cli.main", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (ended.returncode, "PASS" in ended.stdout) == (0, True), ended.stdout + ended.stderr


def written(page: Path, port: int) -> str:
    """The page with the answers of now."""
    return SHOWN.sub(
        lambda match: f"```sh\n{match[1]}\n```\n\n```json\n{answer_to(match[1], port)}\n```", page.read_text()
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for server in serve(Path(root)):
            for page in PAGES:
                page.write_text(written(page, server.port))
