"""`zerodrift serve --shadow-of URL`: a proxy before an engine that runs elsewhere."""

import os
import tempfile
from pathlib import Path
from typing import Any

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.cli.served_at import ServedAt
from zerodrift.core.errors import ConfigError


def checked(url: str, key_env: str | None) -> str | None:
    """The engine's key, where it has one; refused before anything is opened: an address that is none."""
    from zerodrift.serve.shadow.upstream import origin_of

    origin_of(url)
    if key_env is None:
        return None
    if not (key := os.environ.get(key_env)):
        raise ConfigError(
            f"--shadow-key-env names {key_env}, which is not set; put the engine's --api-key into it"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{key_env} holds more than a key: blanks, line breaks or signs that no header takes"
        )
    return key


def check_receipts(
    directory: Path | None, key: Path | None, weight_root: Path | None, *, required: bool
) -> None:
    """What a receipt needs is there, before a model is loaded."""
    from zerodrift.sync.key import read_key

    if directory is None:
        if key is not None or required:
            raise ConfigError(
                "--receipt-key and --require-receipt are of receipts; say where to write them: --receipts DIR"
            )
        return
    if key is None:
        raise ConfigError(
            "receipts are sealed: make a key with `zerodrift sync key receipt.key`, and name it: --receipt-key receipt.key"
        )
    if weight_root is None:
        raise ConfigError(
            "--receipts holds updates against what was sent, and reads none without --weight-root DIR"
        )
    read_key(key)


def run_shadow(where: ServedAt, **settings: Any) -> None:
    """Until it is told to stop; `settings` as in ShadowSettings."""
    from zerodrift.serve.shadow.routes import BY_PATH
    from zerodrift.serve.shadow.server import ShadowServer, ShadowSettings

    told = ShadowSettings(**settings)
    with tempfile.TemporaryDirectory(prefix="zerodrift-serve-") as directory:
        access, path = where.access(Path(directory))
        with Bar() as bar:
            if told.rescore_every or told.receipts:
                bar.stage("load the model")
            server = ShadowServer(access._replace(routes=BY_PATH), told)
        console.say(f"in front of {told.url}")
        server.run(where.sockets, ready=lambda: where.say(path))
    console.note("stopped")
