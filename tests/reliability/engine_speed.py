"""How much processor time does the engine of one source tree take against another's? In turns: A B, A B, …

    python tests/reliability/engine_speed.py BEFORE/src AFTER/src [--pairs 5] [--rounds 10] [--model testbed:qwen3]
        [--requests 32]

Each tree serves the same requests in a process of its own; starting up and one round to warm up are not counted. A ratio
is taken within each pair, where both met the same machine. Both must give the same bits, or nothing is compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import hashlib, json, random, sys, time
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine

model, count, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine, draw = Engine(model, enable_prefix_caching=False), random.Random(0)
prompts = [[draw.randrange(5, 400) for _ in range(draw.randint(8, 64))] for _ in range(count)]
params = [SamplingParams(max_tokens=draw.randint(16, 64), ignore_eos=True, seed=n) for n in range(count)]
engine.generate(prompts[:4], params[:4])
times, digest = [], hashlib.sha256()
for _ in range(rounds):
    begin = time.process_time()
    outputs = engine.generate(prompts, params)
    times.append(time.process_time() - begin)
digest.update(repr([(o.token_ids, o.logprobs) for o in outputs]).encode())
metrics = engine.metrics()
checks = getattr(metrics, "check_seconds", 0.0) / (metrics.seconds + getattr(metrics, "check_seconds", 0.0))
print(json.dumps({"seconds": min(times), "digest": digest.hexdigest(), "checks": checks}))
"""


def measured(source: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Processor seconds of the fastest round, and a digest of every token and logprob."""
    given = [arguments.model, str(arguments.requests), str(arguments.rounds)]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Ratios AFTER / BEFORE; exit code 1 where the median is above --most, or bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="testbed:qwen3")
    parser.add_argument("--requests", type=int, default=32)
    # Of two rounds of half a second the faster one varied by a fifth; the fastest of ten by a twentieth.
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--most", type=float, default=1.05)
    arguments = parser.parse_args()
    ratios = []
    for pair in range(arguments.pairs):
        sides = [arguments.before, arguments.after]
        order = sides if pair % 2 == 0 else sides[::-1]
        found = {side: measured(side, arguments) for side in order}
        before, after = (found[side] for side in sides)
        if before["digest"] != after["digest"]:
            sys.stdout.write("the two trees give other bits; nothing to compare\n")
            return 1
        ratios.append(float(str(after["seconds"])) / float(str(before["seconds"])))
        sys.stdout.write(
            f"pair {pair + 1}: {before['seconds']:.2f} s before, {after['seconds']:.2f} s after, ratio {ratios[-1]:.3f}; "
            f"checks while running {after['checks']:.2%}\n"
        )
        sys.stdout.flush()
    median = statistics.median(ratios)
    sys.stdout.write(f"median {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})\n")
    return int(median > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
