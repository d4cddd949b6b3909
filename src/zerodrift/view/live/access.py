"""Who may look: names under which the server is addressed, and a token for those who come from elsewhere.

A page on the internet can make a browser ask 127.0.0.1, and by a name of its own that resolves to it (DNS rebinding) even
read the answer. It cannot choose the Host that the browser sends, so the name in it must be one of ours, exactly. Its port
may be another: `ssh -L 9000:localhost:8377` is how most people reach a training node.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from zerodrift.core.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::", ""})
LEAST_TOKEN = 16
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.-]+))(?::\d{1,5})?")
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{LEAST_TOKEN},200}}")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(host: str, file: Path | None) -> str | None:
    """The one in `file`; else none on loopback, and a new one beyond it."""
    if file is None:
        return None if is_loopback(host) else secrets.token_urlsafe(24)
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read ({error}); write the token into it") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"--token-file {file} holds no token: {LEAST_TOKEN} to 200 letters, digits, - or _ "
            "(python -c 'import secrets; print(secrets.token_urlsafe())')"
        )
    return token


class Access:
    """Decides for each request."""

    def __init__(self, names: frozenset[str], token: str | None) -> None:
        """`names`: of this machine, lower case; the address that a connection came in on is one too."""
        self._names, self._token = names, token
        self.cookie_value = hashlib.sha256(f"zerodrift.view:{token}".encode()).hexdigest()

    def knows_host(self, header: str | None, local: str) -> bool:
        """Whether the request is addressed to us by a name of ours."""
        match = _HOST.fullmatch(header or "")
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        return name in self._names or (name == local.lower() and name not in WILDCARDS)

    @property
    def asks(self) -> bool:
        """Whether a token is asked for."""
        return self._token is not None

    def is_token(self, given: str) -> bool:
        """In a time that tells nothing."""
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    def admits(self, cookie_name: str, cookies: str, authorization: str) -> bool:
        """Whether the request carries the token, by cookie or as `Bearer`."""
        if self._token is None:
            return True
        if authorization.startswith("Bearer "):
            return self.is_token(authorization.removeprefix("Bearer "))
        try:
            found = SimpleCookie(cookies).get(cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie_value.encode())
