"""Which status does a refusal have? Torch-free.

4xx wherever asking again in the same way would be refused again: TRL re-sends on 500, 502 and 503, prime-rl on every 5xx.
What a client reads are our own sentences: what ended the engine, and errors that are none of ours, are in the log alone, by a number.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from zerodrift.core import errors
from zerodrift.core.errors import EngineStopped, ZerodriftError

RETRY_AFTER_S = 1
_STATUS: tuple[tuple[type[ZerodriftError], int], ...] = (
    (errors.QueueFull, 429),
    (errors.UnknownRequest, 404),
    (errors.UnknownAdapter, 404),
    (errors.NotRetained, 404),
    (errors.DuplicateRequest, 409),
    (errors.DuplicateAdapter, 400),
    (errors.AdapterInUse, 409),
    (errors.VersionConflict, 409),
    (errors.OutOfOrder, 409),
    (errors.NonFinite, 422),
    (errors.InvalidValue, 400),
    (errors.OutOfBlocks, 400),
    (errors.CapabilityMissing, 400),
    (errors.ModelError, 422),
    (errors.DigestMismatch, 422),
    (errors.SchemaMismatch, 422),
    (errors.ArchiveFull, 507),
    (errors.EngineStopped, 503),
)


class CallRefused(Exception):
    """What is answered in place of what was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` is the field that is refused."""
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or HTTPStatus(status).phrase.lower().replace(" ", "-")
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """As OpenAI's clients read errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        )


def refusal_of(error: Exception, where: str) -> CallRefused:
    """What a client is told of `error`; `where` finds it in the log."""
    if isinstance(error, CallRefused):
        return error
    if isinstance(error, errors.BitsDiffer) or type(error) is errors.EngineError:
        error = EngineStopped(
            "the engine has stopped; the server's log says why, and nothing is served until it is started again"
        )
    for kind, status in _STATUS:
        if isinstance(error, kind):
            headers = {"retry-after": str(RETRY_AFTER_S)} if status == 429 else {}
            return CallRefused(status, str(error), code=error.code, headers=headers)
    return CallRefused(
        500,
        f"the server failed, and its log says more under {where}; nothing of the request was served",
        code="internal",
    )
