"""Why did a server fail that was started here? Its log is at hand: the error that it wrote last, and what is known to help."""

import os
import re
from pathlib import Path

READ_BYTES = 256 * 2**10
"""From the end: a traceback of vLLM's engine is 10 kB, and three processes print it."""
LONGEST = 300

# "(EngineCore pid=412) ERROR 11-16 18:20:11 [core.py:1012] " in front of every line of a traceback.
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:(?:ERROR|CRITICAL)\s+[\d-]+ [\d:.,]+ \[[^\]]*\]\s*)?")
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b: \S")
_POINTS_ELSEWHERE = ("EngineDeadError", "EngineGenerateError")
"""What vLLM raises in every process that hears of a failure in another: it names no cause."""

KNOWN = {
    "CPU Generator does not use offset": "a request with a seed whose prefill is cut into chunks ends vLLM's worker on CPU: "
    "set engine.max_num_batched_tokens higher than any prompt (8192 in docs/vllm.yaml), so that none is cut",
}
"""Words of an error, to what mends it."""


def why(log_path: Path, otherwise: str) -> str:
    """Where the log is, its last error, and the remedy if one is known; `otherwise` where it cannot be read."""
    try:
        text = _end_of(log_path)
    except OSError:
        return otherwise
    error = last_error(text)
    told = f"its log is {log_path}"
    if error is not None:
        told += f", where the last error is: {error[:LONGEST]}"
    remedies = [remedy for words, remedy in KNOWN.items() if words in text]
    return "; ".join([told, *remedies])


def last_error(text: str) -> str | None:
    """The last error line that names a cause; one that only points at another where there is no more."""
    lines = [_PREFIX.sub("", line.strip()).strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    causes = [line for line in errors if not any(name in line for name in _POINTS_ELSEWHERE)]
    return next(reversed(causes or errors), None)


def _end_of(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - READ_BYTES))
        return log.read().decode(errors="replace")
