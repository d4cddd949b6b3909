"""vLLM's own RL example over HTTP, against `zerodrift serve`:

    curl -sSLO https://raw.githubusercontent.com/vllm-project/vllm/v0.32.0/examples/rl/rlhf_http_nccl.py
    python docs/vllm_example_run.py rlhf_http_nccl.py TRAINER_MODEL 'http://zd:TOKEN@127.0.0.1:8000' EXCHANGE -- zerodrift serve ...

in an environment that has vLLM 0.32 and this project's plugin for it. The example is run as it is but for the lines of
`changed`: the server's launch line and address, the model, and the backend (no NCCL without two GPUs; the trainer's side of
ours writes a directory EXCHANGE, which the server reads). A release whose example has no such line is refused.
"""

import re
import sys
from pathlib import Path


class Unlike(Exception):
    """The file is not the example that this was written for."""


def changed(source: str, model: str, address: str, exchange: str, launch: list[str]) -> str:
    """The example with another launch line, model and backend."""
    lines = [
        # Launch line, and where the server is: the address carries the admin token, as this client sends no header of its own.
        (r"serve_args = \[.*?\n    \]", f"serve_args = {launch!r}"),
        (r'BASE_URL = f"[^"\n]*"', f"BASE_URL = {address!r}"),
        # Model, and the device that it is on.
        (r'MODEL_NAME = "[^"\n]*"', f"MODEL_NAME = {model!r}"),
        (r'TRAINER_DEVICE = "[^"\n]*"', 'TRAINER_DEVICE = "cpu"'),
        (r"torch\.accelerator\.set_device_index\(TRAINER_DEVICE\)", "pass  # no accelerator"),
        # Backend.
        (
            r"from vllm\.distributed\.weight_transfer\.nccl_engine import NCCLTrainerInitInfo",
            "import zerodrift_vllm\nzerodrift_vllm.register()\nfrom zerodrift_vllm.trainer import DirectoryTrainerInitInfo",
        ),
        (
            r"init_info=NCCLTrainerInitInfo\(.*?\n            \)",
            f"init_info=DirectoryTrainerInitInfo({exchange!r}, rank=0)",
        ),
    ]
    for pattern, line in lines:
        found = re.compile(pattern, re.DOTALL)
        if len(found.findall(source)) != 1:
            raise Unlike(f"{pattern}: not once in this file; it is made for rlhf_http_nccl.py of vLLM 0.32")
        source = found.sub(lambda _, line=line: line, source)
    return source


if __name__ == "__main__":
    example, model, address, exchange, dashes, *launch = sys.argv[1:]
    if dashes != "--" or not launch:
        sys.exit(__doc__)
    source = changed(Path(example).read_text(encoding="utf-8"), model, address, exchange, launch)
    exec(compile(source, example, "exec"), {"__name__": "__main__"})
