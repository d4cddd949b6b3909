"""A trainer that is stopped by SIGSTOP in the middle of an update: `stopped_trainer.py HOST:PORT TOKEN TENSORS` sends v1, and
stops itself after so many tensors. Says `stopping` before, and afterwards `published` or the code of its error.
"""

import os
import signal
import sys
from typing import Any

from updating import model_of, say

from zerodrift.core.errors import ZerodriftError
from zerodrift.sync import http
from zerodrift.sync.http import HttpTarget
from zerodrift.sync.publisher import WeightPublisher


def main(address: str, token: str, tensors: int) -> None:
    real, sent = http._content, iter(range(tensors))

    def content(tensor: Any) -> bytes:
        if next(sent, None) is None:
            http._content = real
            say("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(tensor)

    http._content = content
    try:
        WeightPublisher(model_of("v1"), [HttpTarget(address, bytes.fromhex(token), name="engine")]).publish(
            "v1"
        )
    except ZerodriftError as error:
        say(error.code)
    else:
        say("published")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
