"""Who may look: the token of one page, by cookie or as `Bearer`; names are `web/access.py`'s."""

import hashlib
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from zerodrift.web.access import is_loopback, knows_host, read_token, same_token


def token_for(host: str, file: Path | None) -> str | None:
    """The one in `file`; else none on loopback, and a new one beyond it."""
    if file is None:
        return None if is_loopback(host) else secrets.token_urlsafe(24)
    return read_token("--token-file", file)


class Access:
    """Decides for each request."""

    def __init__(self, names: frozenset[str], token: str | None) -> None:
        """`names`: of this machine, lower case; the address that a connection came in on is one too."""
        self._names, self._token = names, token
        self.cookie_value = hashlib.sha256(f"zerodrift.view:{token}".encode()).hexdigest()

    def knows_host(self, header: str | None, local: str) -> bool:
        """Whether the request is addressed to us by a name of ours."""
        return knows_host(self._names, header, local)

    @property
    def asks(self) -> bool:
        """Whether a token is asked for."""
        return self._token is not None

    def is_token(self, given: str) -> bool:
        """In a time that tells nothing."""
        return self._token is not None and same_token(given, self._token)

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
        return found is not None and same_token(found.value, self.cookie_value)
