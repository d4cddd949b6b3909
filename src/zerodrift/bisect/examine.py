"""One engine, from nothing to an audit: its environment, its server on loopback, a small audit, and the server gone."""

import shutil
import time
from pathlib import Path
from typing import Protocol

import msgspec

from zerodrift.audit.progress import Progress
from zerodrift.audit.session import Session
from zerodrift.backends.vllm_launch import launch_vllm
from zerodrift.backends.vllm_release import read_release
from zerodrift.bisect.environments import Environments, installed
from zerodrift.bisect.records import AUDIT, Point, PointTried, write_tried
from zerodrift.bisect.states import not_judged
from zerodrift.config.engine import EngineConfig
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import EngineError, InstallFailed

INSTALL_LOG, SERVER_LOG = "install.log", "vllm.log"


class NamedProgress(Progress, Protocol):
    """Of several runs, one after the other."""

    part: str
    """Before the name of every stage."""


class Examiner(msgspec.Struct, frozen=True, kw_only=True):
    """Looks at one point after the other, all in the same way."""

    environments: Environments
    config: RunConfig
    model: Path
    """What is served, and what it is compared with."""
    progress: NamedProgress

    def __call__(self, point: Point, directory: Path) -> PointTried:
        """What came of it, which is on the disk by then. A release that fails is a result; a full disk is none."""
        began = time.monotonic()
        # An audit that was interrupted was of a server that is no more.
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        packages: dict[str, str] = {}
        self.progress.part = f"{point.name}: "
        self.progress.stage("install")
        try:
            python = self.environments.take(point.release, directory / INSTALL_LOG)
            packages = installed(python)
            why = self._audit(point, python, directory)
        except (EngineError, InstallFailed) as error:
            why = str(error)
        seconds = time.monotonic() - began
        tried = PointTried(point=point, not_judged=why, seconds=seconds, packages=packages)
        write_tried(directory, tried)
        return tried

    def _audit(self, point: Point, python: Path, directory: Path) -> str:
        """Why it could not be judged; empty where it was."""
        self.progress.stage("start the server")
        engine = self.config.engine
        release = read_release(engine, python, engine.env)
        env, patience_s = {**release.env, **engine.env}, engine.startup_timeout_s
        log = directory / SERVER_LOG
        with launch_vllm(python, self.model, point.flags, env, log, patience_s) as server:
            # By its address: a server that we configure would be told what its logprobs are to mean.
            asked = EngineConfig(
                name="vllm",
                url=server.url,
                concurrency=engine.concurrency,
                request_timeout_s=engine.request_timeout_s,
            )
            model = msgspec.structs.replace(self.config.model, path=str(self.model))
            config = msgspec.structs.replace(self.config, engine=asked, model=model)
            return not_judged(Session(config=config, directory=directory / AUDIT).run(self.progress).record)
