"""Branch coverage, held by package: 100 % where decisions are made, 90 % elsewhere.

Runs after pytest has left its data behind; exits non-zero with the files that fall short.
"""

import io
import json
import sys
import tempfile
from pathlib import Path

import coverage

DECIDING = ("core", "config", "records", "stats", "view")
LIMITS = dict.fromkeys(DECIDING, 100.0)
ELSEWHERE = 90.0
# Code that only a foreign engine, a browser or a download exercises; its own lane tests it.
OTHER_LANES = {
    "backends/launch.py": "starts real vLLM: make test-engines",
    "backends/llama_cpp_serve.py": "runs in llama.cpp's own environment: make test-engines",
    "cli/demo.py": "runs whole audits: make demo, make demo-vllm",
    "exact/ops/triton/": "needs a GPU: tests/gpu/exact_on_cuda.py",
    "exact/fused_layers.py": "needs a GPU: tests/gpu/engine_on_cuda.py",
    "__init__.py": "its error branch needs an environment without torch, and runs in subprocesses",
}


def main() -> int:
    data = coverage.Coverage()
    data.combine() if list(Path().glob(".coverage.*")) else data.load()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        data.json_report(outfile=file.name, pretty_print=False)
        files = json.loads(Path(file.name).read_text())["files"]
    totals: dict[str, list[tuple[str, int, int]]] = {}
    for name, entry in files.items():
        path = name.split("zerodrift/", 1)[1]
        if path.startswith(tuple(OTHER_LANES)):
            continue
        summary = entry["summary"]
        hit = summary["covered_lines"] + summary["covered_branches"]
        all_of = summary["num_statements"] + summary["num_branches"]
        totals.setdefault(path.split("/")[0], []).append((path, hit, all_of))
    out, failed = io.StringIO(), False
    for package, entries in sorted(totals.items()):
        hit, all_of = sum(entry[1] for entry in entries), sum(entry[2] for entry in entries)
        share, limit = 100 * hit / max(all_of, 1), LIMITS.get(package, ELSEWHERE)
        short = share < limit
        failed |= short
        out.write(
            f"{package:15} {share:6.2f} %  (at least {limit:.0f} %){'  <-- too low' if short else ''}\n"
        )
        if short:
            for path, part, whole in sorted(entries, key=lambda e: e[1] - e[2])[:6]:
                if part < whole:
                    missing = files[next(f for f in files if f.endswith(path))]["missing_lines"]
                    out.write(f"    {path}: {whole - part} missed, lines {missing[:15]}\n")
    sys.stdout.write(out.getvalue())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
