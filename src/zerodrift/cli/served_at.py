"""Where a server listens, whom it lets in, and what it says of both at its start."""

from pathlib import Path
from typing import Any

from zerodrift.cli import console


class ServedAt:
    """Sockets and tokens."""

    def __init__(
        self,
        host: str,
        port: int,
        admin_port: int | None,
        names: list[str],
        token: str | None,
        admin: Path | None,
    ) -> None:
        from zerodrift.serve.limits import ServeLimits
        from zerodrift.serve.listening import allow_files, listen

        allow_files(ServeLimits())
        self.host, self.names, self.token, self.admin_file = host, names, token, admin
        self.sockets = [listen(host, port)]
        self.port = self.sockets[0].getsockname()[1]
        self.admin_port: int | None = None
        if admin_port is not None:
            self.sockets.append(listen(host, admin_port))
            self.admin_port = self.sockets[1].getsockname()[1]

    def access(self, directory: Path) -> tuple[Any, Path]:
        """Who gets in, and the file with the admin token."""
        from zerodrift.serve.access import ServeAccess, new_token_file
        from zerodrift.web.access import names_of, read_token

        if self.admin_file is None:
            token, path = new_token_file(directory)
        else:
            token, path = read_token("--admin-token-file", self.admin_file), self.admin_file
        return ServeAccess(names_of(self.host, self.names), token, self.token, self.admin_port), path

    def say(self, path: Path) -> None:
        """Where it is reached."""
        from zerodrift.web.access import is_loopback

        if not is_loopback(self.host):
            console.note("nothing is encrypted: whoever reads the network reads tokens; put TLS in front")
        name = f"[{self.host}]" if ":" in self.host else self.host
        console.say(
            f"listening on http://{name}:{self.port}   (Ctrl-C ends it; what is in flight ends first)"
        )
        if self.admin_port is not None:
            console.say(f"control routes: http://{name}:{self.admin_port}")
        console.say(f"admin token: {path}")
