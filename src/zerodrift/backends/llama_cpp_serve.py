"""Serves one GGUF file with llama.cpp. Runs in the environment that holds xllamacpp, which has nothing of ours.

    python -I llama_cpp_serve.py FILE.gguf PORT [NAME=VALUE …]

NAME is a field of llama.cpp's common_params, `sampling.top_k` for one of a part of it.
"""

import signal
import sys
from importlib import import_module


def assign(params: object, name: str, text: str) -> None:
    """Set the field, in the type that it has; a name that is not there or a value that does not fit ends us."""
    *parts, field = name.split(".")
    for part in parts:
        params = getattr(params, part)
    kind = type(getattr(params, field))
    if kind is bool and text not in ("true", "false"):
        sys.exit(f"{name} is {text!r}; it is true or false")
    setattr(params, field, text == "true" if kind is bool else kind(text))


def main(model: str, port: str, settings: list[str]) -> None:
    """Serve until we are told to end."""
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    for setting in settings:
        name, _, text = setting.partition("=")
        assign(params, name, text)
    server = xllamacpp.Server(params)
    sys.stdout.write(f"serving {model} at {server.listening_address}\n")
    sys.stdout.flush()
    # llama.cpp's own handler ends its loop and leaves this process standing.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
