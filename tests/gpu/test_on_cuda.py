"""All that CI cannot look at, by one command on a machine with a GPU:

    PYTHONPATH=src OUT=reports python -m pytest -m gpu tests/gpu

Families other than Qwen3: `-k "gemma3 or moe"`. Each script of this folder runs in a process of its own, since none gives back
all of a GPU's memory, and writes its JSON to $OUT. Where there is no GPU, all are skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

HERE = Path(__file__).parent
SCRIPTS = {
    "products, log-probabilities and draws": "ops_on_cuda.py",
    "decode, prefill and the trainer's forward": "exact_on_cuda.py",
    "the engine, 1,000 requests, one of 32k": "engine_on_cuda.py --sequences 1000",
    "gemma3: decode, prefill and the trainer's forward": "exact_on_cuda.py --family gemma3 --sequences 96",
    "gemma3: the engine": "engine_on_cuda.py --family gemma3 --sequences 96",
    "gemma3: the trainer's gradients": "trainer_on_cuda.py --family gemma3",
    "moe: decode, prefill and the trainer's forward": "exact_on_cuda.py --family qwen3-moe --sequences 96",
    "moe: the engine": "engine_on_cuda.py --family qwen3-moe --sequences 96",
    "moe: neighbours that turn NaN or are preempted": "neighbours_on_cuda.py --sequences 96",
    "moe: the trainer's gradients": "trainer_on_cuda.py --family qwen3-moe",
    "the trainer's gradients, 0.6B": "trainer_on_cuda.py --size 0.6B",
    "the trainer's time, 8B": "trainer_on_cuda.py --size 8B",
    "beside itself, 0.6B": "itself_on_cuda.py --size 0.6B",
    "beside itself, 8B": "itself_on_cuda.py --size 8B",
    "1,024 requests": "itself_on_cuda.py --size 0.6B --requests 1024",
    "64 contexts of 8k": "itself_on_cuda.py --size 0.6B --requests 64 --prompt 8192 --output 128",
    "transformers generate": "peers_on_cuda.py transformers",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_on_cuda(what: str, tmp_path: Path) -> None:
    script, *options = SCRIPTS[what].split()
    environment = {"OUT": str(tmp_path), **os.environ}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
