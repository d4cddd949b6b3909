"""Who may ask: names under which a server is addressed, and tokens. Torch-free.

A page on the internet can make a browser ask 127.0.0.1, and by a name of its own that resolves to it (DNS rebinding) even
read the answer. It cannot choose the Host that the browser sends, so the name in it must be one of ours, exactly. Its port
may be another: `ssh -L 9000:localhost:8377` is how most people reach a training node.
"""

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
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


def names_of(host: str, more: Sequence[str] = ()) -> frozenset[str]:
    """Under which a server on `host` may be addressed; never by a wildcard, which any page could write."""
    own = {socket.gethostname(), host} - WILDCARDS if not is_loopback(host) else {host}
    return frozenset(name.lower() for name in {*LOOPBACK, *own, *more})


def knows_host(names: Collection[str], header: str | None, local: str) -> bool:
    """Whether a request is addressed to us by one of `names`, or by the address that its connection came in on."""
    match = _HOST.fullmatch(header or "")
    if match is None:
        return False
    name = (match[1] or match[2]).lower()
    return name in names or (name == local.lower() and name not in WILDCARDS)


def same_token(given: str, token: str) -> bool:
    """In a time that tells nothing."""
    return hmac.compare_digest(given.encode(), token.encode())


def read_token(option: str, file: Path) -> str:
    """The token that a user wrote into `file`."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} cannot be read ({error}); write the token into it") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{option} {file} holds no token: {LEAST_TOKEN} to 200 letters, digits, - or _ "
            "(python -c 'import secrets; print(secrets.token_urlsafe())')"
        )
    return token
