"""A signal handler may stop the loop, wherever the signal finds the main thread.

Deployments end a program by SIGTERM, and its handler runs in the main thread, between any two lines of what that does.
"""

import subprocess
import sys

PROGRAM = """
import faulthandler, os, signal, sys, threading
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from zerodrift.core.errors import EngineStopped, UnknownRequest
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.models.testbed_config import CONFIGS

# Whoever waits for ever is shown, and the program ends with 1.
faulthandler.dump_traceback_later(45, exit=True)
small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
         "vocab_size": 61, "num_hidden_layers": 1, "max_position_embeddings": 64}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIGS["qwen3"], **small})).eval()
engine = Engine(model, num_blocks=64, block_size=4, logprob_check_interval=0)
params = SamplingParams(max_tokens=40, ignore_eos=True)
FILES = tuple(os.path.join("engine", name) for name in ("loop.py", "handle.py", "latch.py")) + (threading.__file__,)


def use(loop, what, handles):
    if what == "submit":
        handles.append(loop.submit([6], params))
    elif what == "abort":
        loop.abort(handles[0].request_id)
    elif what == "result":
        handles[0].result()
    elif what == "pause":
        loop.pause()
    elif what == "stop":
        loop.stop(drain=False)


def hit(what, line):
    # SIGTERM before the given line of the loop's own files that the main thread comes to; False where there is none.
    loop, left = EngineLoop(engine), [line]
    signal.signal(signal.SIGTERM, lambda *_: loop.stop(drain=False))

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    handles = [loop.submit([number], params) for number in range(1, 5)]
    sys.settrace(trace)
    try:
        use(loop, what, handles)
    except (EngineStopped, UnknownRequest):
        pass
    finally:
        sys.settrace(None)
    loop.stop(drain=False)
    assert not loop.alive
    for handle in handles:
        try:
            assert handle.result(timeout=20)
        except EngineStopped:
            pass
    return left[0] <= 0


for what in sys.argv[1:]:
    line = 1
    while hit(what, line):
        line += 1
    print(what, line - 1, flush=True)
"""


def test_stopped_by_a_signal_at_any_line() -> None:
    calls = ["submit", "abort", "result", "pause", "stop"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *calls], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    hits = {call: int(lines) for call, lines in (line.split() for line in done.stdout.splitlines())}
    assert list(hits) == calls
    assert min(hits.values()) > 0, "a call in which no signal came shows nothing"
    assert hits["submit"] > 10
