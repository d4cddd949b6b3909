"""A search from its directory to its answer, with everything that it starts ended and everything that it installs removed."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from zerodrift.bisect.environments import Environments
from zerodrift.bisect.examine import Examiner, NamedProgress
from zerodrift.bisect.records import LOCK, MODEL, BisectAnswer, BisectQuestion, Point, open_question
from zerodrift.bisect.search import PointSearch
from zerodrift.bisect.states import ChangeKind
from zerodrift.config.load import dump
from zerodrift.config.run import RunConfig
from zerodrift.models.older_words import write_for_all
from zerodrift.records.lock import only_writer

BUILT_IN = "testbed:"


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """What is searched, where, and with what."""

    directory: Path
    points: Sequence[Point]
    config: RunConfig
    environments: Environments
    progress: NamedProgress
    what: ChangeKind | None
    retry: bool = False

    def run(self) -> BisectAnswer:
        """Go on with what the directory holds, or begin there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with only_writer(self.directory / LOCK, self.directory):
            question = BisectQuestion(points=tuple(self.points), settings=dump(self.config))
            open_question(self.directory, question)
            self.environments.clear()
            with closing(self.environments):
                return self._search().run()

    def _search(self) -> PointSearch:
        examine = Examiner(
            environments=self.environments,
            config=self.config,
            model=_model(self.config.model.path or "", self.directory / MODEL),
            progress=self.progress,
        )
        return PointSearch(
            directory=self.directory,
            points=self.points,
            examine=examine,
            what=self.what,
            tell=self.progress.note,
            retry=self.retry,
        )


def _model(spec: str, directory: Path) -> Path:
    """A directory that every release can read; a built-in model is written out once."""
    if not spec.startswith(BUILT_IN):
        return Path(spec)
    if not directory.is_dir():
        # Whole or not at all: one that was killed half way would be another model.
        half = directory.with_name(f"{directory.name}.half")
        write_for_all(spec, half)
        half.replace(directory)
    return directory
