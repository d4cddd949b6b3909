"""Who may call which route? Decided on the raw path, before a byte of a body is read. Torch-free.

vLLM's --api-key covers /v1 and /inference and leaves /pause and /update_weights open; here a path that the table does not
have, a method that it does not have and a token that does not reach are refused, and nothing else is looked at.
"""

import base64
import binascii
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.routes import BY_PATH, Level, ServedRoute
from zerodrift.web.access import is_loopback, knows_host, same_token

MOST_AUTHORIZATION = 1024
_CHALLENGE = {"www-authenticate": 'Bearer realm="zerodrift", Basic realm="zerodrift"'}


_NEEDS = {
    Level.INFERENCE: "this server needs its token, as `Authorization: Bearer TOKEN` or in the address: http://zd:TOKEN@host",
    Level.ADMIN: "this call needs the admin token, see the file that `zerodrift serve` named at its start",
}


class Caller(NamedTuple):
    """What is looked at of a request to let it in."""

    method: str
    path: str
    """As it was sent: nothing is decoded, so that no path has two spellings."""
    headers: Mapping[str, list[str]]
    """Lower-case names, every value."""
    local: str
    """The address that the connection came in on."""
    port: int | None

    def one(self, name: str) -> str | None:
        """A header that was sent once; twice is as bad as never."""
        values = self.headers.get(name, [])
        return values[0] if len(values) == 1 else None


class ServeAccess(NamedTuple):
    """What one server asks for."""

    names: frozenset[str]
    """Under which it may be addressed, lower case."""
    admin_token: str
    inference_token: str | None
    """None: whoever reaches the port may generate."""
    admin_port: int | None = None
    """Where control routes answer, if not on the port of all others."""
    routes: Mapping[str, Mapping[str, ServedRoute]] = BY_PATH
    """What there is, by path and method."""

    def admit(self, caller: Caller) -> ServedRoute:
        """The route that is called, or a refusal."""
        self._check_names(caller)
        level = self._level(caller)
        methods = self.routes.get(caller.path)
        needed = _needed(methods or {}, caller.method)
        if level < needed:
            sent = bool(caller.headers.get("authorization"))
            raise CallRefused(
                403 if sent else 401,
                ("the token that was sent is another: " if sent else "") + _NEEDS[needed],
                code="access/token",
                headers=_CHALLENGE,
            )
        if methods is None:
            listed = "; /openapi.json lists them" if "/openapi.json" in self.routes else ""
            raise CallRefused(404, f"there is no such route{listed}", code="route/unknown")
        if needed is Level.ADMIN and self.admin_port not in (None, caller.port):
            raise CallRefused(403, "control routes answer on the admin port alone", code="access/port")
        if (route := methods.get(caller.method)) is None:
            allowed = ", ".join(sorted(methods))
            raise CallRefused(
                405, f"this route takes {allowed}", code="route/method", headers={"allow": allowed}
            )
        return route

    def is_ours(self, authorization: str | None) -> bool:
        """Whether this header carries a token of this server: nothing that is to be passed on."""
        given = _token(authorization)
        return same_token(given, self.admin_token) or same_token(
            given, self.inference_token or self.admin_token
        )

    def _check_names(self, caller: Caller) -> None:
        host = caller.one("host")
        if not knows_host(self.names, host, caller.local):
            raise CallRefused(
                421,
                "this server is not known by that name; add it with --allow-host NAME",
                code="access/host",
            )
        origins = caller.headers.get("origin", [])
        if origins and (len(origins) != 1 or origins[0] not in (f"http://{host}", f"https://{host}")):
            raise CallRefused(403, "pages of other origins may not call this server", code="access/origin")

    def _level(self, caller: Caller) -> Level:
        """What the caller may do; a wrong token is as good as none."""
        given = _token(caller.one("authorization"))
        # Both are compared, whichever it is, so that the time tells nothing.
        admin = same_token(given, self.admin_token)
        inference = same_token(given, self.inference_token or self.admin_token)
        if admin:
            return Level.ADMIN
        return Level.INFERENCE if inference or self.inference_token is None else Level.OPEN


def _needed(methods: Mapping[str, ServedRoute], method: str) -> Level:
    """Of a method that the path does not have, and of a path that is not there, no more is told than anybody may know."""
    if method in methods:
        return methods[method].level
    return min((route.level for route in methods.values()), default=Level.INFERENCE)


def _token(authorization: str | None) -> str:
    """Of `Bearer TOKEN`, or of `Basic base64(anyone:TOKEN)`: clients without headers of their own put it into the address."""
    scheme, _, given = (authorization or "")[:MOST_AUTHORIZATION].partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""


def check_exposure(host: str, *, has_token: bool, unsafe: bool) -> None:
    """Beyond loopback nobody generates without a token, unless somebody said so in as many words."""
    if not is_loopback(host) and not has_token and not unsafe:
        raise ConfigError(
            f"--host {host} is reached from other machines; give --token-file FILE (or --unsafe-allow-unauthenticated, and "
            "whoever reaches the port may generate)"
        )


def new_token_file(directory: Path) -> tuple[str, Path]:
    """A new admin token, in a file of this user alone."""
    token = secrets.token_urlsafe(32)
    path = directory / "admin-token"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, 0o600)
        file.write(token + "\n")
    return token, path
