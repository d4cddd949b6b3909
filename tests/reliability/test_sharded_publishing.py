"""A model that two processes share by FSDP2 reaches the engine whole, or both processes hear that it did not."""

import json
import subprocess
import sys
from pathlib import Path


def test_two_ranks_publish_one_model(tmp_path):
    command = [
        sys.executable,
        str(Path(__file__).with_name("sharded_publishing.py")),
        str(tmp_path / "store"),
        str(tmp_path),
    ]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, err) in zip(ranks, told, strict=True):
        assert process.returncode == 0, err[-3000:]
    first, second = (json.loads(out) for out, _ in told)
    # Each rank's gradients are in it: the digest is of what both gathered, and another after every step.
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 3
    kept, _, last = first["digests"]
    assert first["serves"] == [["step 1", kept], ["step 1", kept], ["step 3", last]]
    assert first["receipts"] == ["confirmed", "confirmed"]
    assert "was served before" in first["refused"][0]
    assert "rank 0 could not publish 'step 1'" in second["refused"][0]
    assert (len(first["refused"]), len(second["refused"])) == (1, 1)
    assert "name at least one" in first["targets"]
    assert "rank 1 of a sharded model has targets" in second["targets"]
