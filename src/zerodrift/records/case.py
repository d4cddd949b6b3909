"""`case.json`: the smallest set of requests that an engine still answers with wrong numbers."""

from pathlib import Path

import msgspec

from zerodrift.core.errors import RecordError
from zerodrift.core.request import Request, SamplingParams
from zerodrift.records.codec import write_atomically

SCHEMA = "zerodrift.case/1"
_PLAIN = SamplingParams()
_SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that are sent together; the first one's answer is judged, the others are its company."""

    schema: str = SCHEMA
    requests: tuple[Request, ...]
    limit: float
    """Nats. A token that is further off than this is wrong."""

    def __post_init__(self) -> None:
        """A case of nothing shows nothing."""
        if self.schema != SCHEMA:
            raise ValueError(f"schema is {self.schema!r}, and this version reads {SCHEMA!r}")
        if not self.requests or not self.limit > 0:
            raise ValueError("a case has a request at least, and a limit above 0")

    @property
    def message(self) -> str:
        """In words."""
        judged = self.requests[0]
        sampling, company = judged.sampling, len(self.requests) - 1
        parts = [
            f"prompt of {_count(len(judged.prompt.token_ids), 'token')}",
            f"{_count(sampling.max_tokens, 'token')} answered",
            f"beside {_count(company, 'other request')}" if company else "alone",
            *(
                f"{name} {value:g}"
                for name in _SHOWN
                if (value := getattr(sampling, name)) != getattr(_PLAIN, name)
            ),
        ]
        return ", ".join(parts)


def write_case(path: Path, case: Case) -> None:
    """Indented for people."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(case), indent=2) + b"\n")


def read_case(path: Path) -> Case:
    """What `write_case` wrote."""
    if not path.is_file():
        raise RecordError(f"there is no {path}; an audit that finds a difference leaves one in its directory")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Case)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"{path} is no case of ours: {error}") from error


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
