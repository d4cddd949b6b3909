"""What somebody gets who installs the wheel: built, put into environments that hold nothing else, and run there.

    python tests/reliability/wheel_in_empty_env.py            # both environments, into a new folder below /tmp
    python tests/reliability/wheel_in_empty_env.py --only base --python python3.12 --python python3.13
    python tests/reliability/wheel_in_empty_env.py --beside .engines/vllm-0.32.0 --beside .engines/trl-1.16.0

The base has no torch: `doctor`, `blame --help`, the monitor, reading runs. What needs more must name the extra, with the exit
code of a wrong usage. `[local]` runs everything; of torch the CPU build is installed first, since a bare `torch` brings
gigabytes of CUDA. Beside an engine or a trainer that is installed already, in a copy of its environment, both are asked in
turn, and no package that was there may be another one afterwards. Needs a package index, and takes minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
SERVE = "vllm serve ./model --logprobs-mode processed_logprobs --generation-config vllm"
MONITOR = "import zerodrift as zd; assert zd.Monitor().log_step(0, kl_estimate=6e-4).state == 'OK'; print('monitored')"
NO_TORCH = "import sys, zerodrift, zerodrift.cli.main; assert 'torch' not in sys.modules; print(zerodrift.__version__)"


class Ask(NamedTuple):
    """A command, and how it must end."""

    words: Sequence[str]
    codes: Sequence[int] = (0,)
    says: str = ""
    refuses: str = ""
    """What it says where it ends with 2."""


def everywhere(run: Path) -> list[Ask]:
    """What needs nothing beside the base; `run` is a finished run directory from elsewhere."""
    verbs = (
        "audit",
        "blame",
        "doctor",
        "env",
        "preflight",
        "init",
        "demo",
        "bench",
        "baseline",
        "archive",
        "view",
        "sync",
    )
    return [
        Ask(["zerodrift", "--help"], says="doctor"),
        *(Ask(["zerodrift", verb, "--help"], says="Usage") for verb in verbs),
        Ask(["python", "-c", NO_TORCH]),
        Ask(["python", "-c", MONITOR], says="monitored"),
        Ask(["zerodrift", "doctor", SERVE], (0, 3)),
        Ask(["zerodrift", "doctor", "vllm serve ./model", "--json"], (1,), '"findings"'),
        Ask(["zerodrift", "env", "--json"], says='"zerodrift"'),
        Ask(["zerodrift", "init"], says="wrote zerodrift.yaml"),
        *([Ask(["zerodrift", "audit", "ls", str(run.parent)])] if run.is_dir() else []),
    ]


BASE = [
    Ask(["zerodrift", "audit", "testbed:llama"], (2,), "zerodrift[local]"),
    Ask(["zerodrift", "blame", "dump.jsonl", "--model", "testbed:llama"], (2,), "zerodrift[local]"),
    Ask(["zerodrift", "demo"], (2,), "zerodrift[local]"),
    Ask(["python", "-c", "import zerodrift as zd; zd.Engine"], (1,), "zerodrift[local]"),
]
WITH_TORCH = [
    # An engine's or a trainer's own environment has torch, and perhaps all of the extra: it works, or names it.
    Ask(["zerodrift", "audit", "testbed:llama"], (0, 2, 3), refuses="zerodrift[local]"),
    Ask(["zerodrift", "blame", "dump.jsonl", "--model", "testbed:llama"], (2,)),
]
LOCAL = [
    Ask(["zerodrift", "demo"], says="PASS"),
    Ask(["zerodrift", "blame", "dump.jsonl", "--model", "testbed:llama"], (2,), "dump.jsonl"),
    Ask(
        [
            "zerodrift",
            "audit",
            "testbed:llama",
            "--set",
            "validation.num_prompts=8",
            "--trials",
            "8",
            "--out",
            "run",
        ],
        (0, 3),
    ),
    Ask(["zerodrift", "audit", "ls", "."], says="run"),
]


def build(into: Path) -> tuple[Path, Path]:
    """Wheel and sdist, the former out of the latter: what is not in the sdist is in neither."""
    tools = environment(into / "build-env", sys.executable)
    pip(tools, "setuptools>=77", "wheel")
    sdist = into / "sdist"
    sdist.mkdir()
    make = f"from setuptools import build_meta as b; b.build_sdist({str(sdist)!r})"
    # In a copy: setuptools leaves its own files beside what it packs.
    tree = into / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([tools / "python", "-c", make], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (archive,) = sdist.glob("*.tar.gz")
    wheels = into / "wheels"
    words = [
        str(tools / "python"),
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        str(archive),
    ]
    subprocess.run([*words, "--wheel-dir", str(wheels)], check=True, cwd=into)
    (wheel,) = wheels.glob("zerodrift-*.whl")
    return wheel, archive


def environment(place: Path, python: str) -> Path:
    """A new environment's folder of programs."""
    subprocess.run([python, "-m", "venv", place], check=True)
    return place / "bin"


def copied(place: Path, engine: Path) -> Path:
    """The same of an environment that is there already; pip replaces files and never writes into one, so links will do."""
    subprocess.run(["cp", "--archive", "--link", engine.resolve(), place], check=True)
    return place / "bin"


def pip(programs: Path, *names: str) -> None:
    """Install there."""
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", *names], check=True)


def installed(programs: Path) -> dict[str, str]:
    """Package to version."""
    words = [str(programs / "python"), "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {package["name"]: package["version"] for package in listed}


def changed(programs: Path, before: dict[str, str]) -> list[str]:
    """What was there, and is another one now."""
    now = installed(programs)
    return [
        f"{name} {version} became {now.get(name)}"
        for name, version in before.items()
        if now.get(name) != version
    ]


def ask(programs: Path, asked: Ask, cwd: Path) -> str | None:
    """What is wrong with the answer; None where nothing is."""
    words = [str(programs / asked.words[0]), *asked.words[1:]]
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    env = {**kept, "PATH": f"{programs}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    # Where Python itself was asked, its traceback ends in our error.
    raised = "Traceback" in told and asked.words[0] != "python"
    refused = done.returncode != 2 or asked.refuses in told
    fits = done.returncode in asked.codes and asked.says in told and refused and not raised
    say(f"{'ok  ' if fits else 'FAIL'} {done.returncode}  {' '.join(asked.words)[:100]}")
    return None if fits else f"{' '.join(asked.words)} ended with {done.returncode}:\n{told[-2000:]}"


def say(text: str) -> None:
    """For whoever waits."""
    print(text, flush=True)  # noqa: T201 - a program


class Place(NamedTuple):
    """An environment, what goes into it one after the other, and what is asked after each."""

    name: str
    programs: Path
    steps: Sequence[tuple[str, Sequence[Ask]]]


def places(options: argparse.Namespace, wheel: Path, into: Path) -> Iterator[Place]:
    """Empty ones of every Python, and those that are there already."""
    for python in options.python or ([] if options.beside else [sys.executable]):
        for kind in ("base", "local") if options.only is None else (options.only,):
            name = f"{kind}-{Path(python).resolve().name}"
            programs = environment(into / name, python)
            if kind == "base":
                yield Place(name, programs, [(str(wheel), BASE)])
            else:
                pip(programs, TORCH)
                yield Place(name, programs, [(f"{wheel}[local]", LOCAL)])
    for engine in options.beside:
        steps = [(str(wheel), WITH_TORCH), (f"{wheel}[local]", LOCAL)]
        yield Place(engine.name, copied(into / engine.name, engine), steps)


def tried(place: Place, run: Path, into: Path) -> list[str]:
    """What is wrong with the answers there."""
    cwd = into / f"{place.name}-work"
    cwd.mkdir()
    version = subprocess.run([place.programs / "python", "-V"], check=True, capture_output=True, text=True)
    say(f"{place.name}: {version.stdout.strip()}")
    before, wrong = installed(place.programs), []
    for what, asked in place.steps:
        pip(place.programs, what)
        say(f"installed {Path(what).name}")
        moved = changed(place.programs, before)
        say(f"{len(before)} packages were there, {len(moved)} are others now")
        first = everywhere(run) if (what, asked) == place.steps[0] else []
        answers = [ask(place.programs, each, cwd) for each in (*first, *asked)]
        wrong += [*moved, *(told for told in answers if told is not None)]
    return wrong


def main() -> None:
    """Build, install, ask; exit code 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("base", "local"))
    parser.add_argument("--python", action="append", default=[], help="an interpreter; this one by default")
    parser.add_argument(
        "--beside", action="append", default=[], type=Path, help="an environment that is there"
    )
    parser.add_argument(
        "--run", type=Path, default=Path("nowhere"), help="a finished run directory, to be listed"
    )
    options = parser.parse_args()
    into = Path(tempfile.mkdtemp(prefix="zerodrift-wheel-"))
    wheel, archive = build(into)
    say(f"{wheel.name} {wheel.stat().st_size:,} bytes; {archive.name} {archive.stat().st_size:,} bytes")
    wrong = [told for place in places(options, wheel, into) for told in tried(place, options.run, into)]
    say("\n\n".join(wrong) or "every answer is as it should be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
