import io

import msgspec
import pytest
from rich.console import Console

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.rule import Severity
from zerodrift.doctor.setting import Origin, Setting
from zerodrift.view.diagnosis import print_diagnosis

SOUND = "vllm serve Q --logprobs-mode processed_logprobs --generation-config vllm --no-enable-prefix-caching"


def shown(diagnosis: Diagnosis, width: int = 80, *, everything: bool = True) -> list[str]:
    out = io.StringIO()
    print_diagnosis(diagnosis, Console(file=out, width=width), everything=everything)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def of(command: str) -> Diagnosis:
    return diagnose(CommandLine(command), {})[0]


def test_the_worst_comes_first_with_what_to_type() -> None:
    lines = shown(of("vllm serve Q"))
    assert lines[0].startswith("WRONG  Do not train on this yet: 1 wrong,")
    assert lines[3] == "wrong  logprobs mode raw_logprobs"
    assert "       fix   --logprobs-mode processed_logprobs" in lines
    assert "       cause semantic/raw-logprobs" in lines
    assert "       see   https://github.com/vllm-project/vllm/issues/42259" in lines


def test_settings_that_are_all_known_are_folded() -> None:
    diagnosis = of(SOUND)
    known = tuple(row for row in diagnosis.settings if row.severity is not Severity.UNKNOWN)
    lines = shown(msgspec.structs.replace(diagnosis, settings=known), everything=False)
    assert not any(line.startswith("setting") for line in lines)
    assert lines[-1].endswith("--all")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_setting_is_shown_whole_and_fits(width) -> None:
    diagnosis = of("vllm serve Q --hf-overrides '{\"" + "x" * 200 + "\": 1}'")
    lines = shown(diagnosis, width)
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("setting")) + 1 :]
    assert sum(not line.startswith("    ") for line in table) == len(diagnosis.settings)
    words = " ".join(table).split()
    assert all(set(row.message.split()) <= set(words) for row in diagnosis.settings)
    # Names, values and judgements are never cut; sentences go on below.
    assert all(len(line) <= width for line in table if width >= 80 or line.startswith("    "))


def test_what_is_counted_is_counted_in_words_that_fit() -> None:
    assert [each.split()[1] for each in of("vllm serve Q").counts()] == ["wrong", "risks", "notes", "unknown"]
    assert "1 risk" in of(f"{SOUND} --async-scheduling").counts()
    lines = shown(msgspec.structs.replace(of(SOUND), findings=()), everything=False)
    assert lines[-1].startswith("all "), "no notes are not counted"


@pytest.mark.parametrize(
    ("command", "word"),
    [(SOUND, "OK"), ("vllm serve Q", "WRONG"), (f"{SOUND} --logprobs-mode $M", "UNKNOWN")],
)
def test_the_headline_is_the_exit_code(command: str, word: str) -> None:
    assert shown(of(command))[0].startswith(word)


def test_what_was_not_judged_stands_at_the_end() -> None:
    assert shown(of(f"{SOUND} --block-size 8"))[-2:] == ["not judged:", "    --block-size"]
    assert "not judged:" not in shown(of(SOUND))


def test_a_terminal_is_not_obeyed() -> None:
    lines = shown(of("vllm serve Q --dtype '\x1b[2J'"))
    assert not any("\x1b[2J" in line for line in lines)


def test_what_the_caller_knows_is_asked_for_and_what_the_target_says_wins() -> None:
    asked = {
        "seed": Setting("seed", 9, Origin.ASKED),
        "temperature": Setting("temperature", 0.5, Origin.ASKED),
    }
    rows = {row.setting: row for row in diagnose(CommandLine("vllm serve Q --seed 3"), asked)[0].settings}
    assert rows["seed"].value == 3
    assert (rows["temperature"].value, rows["temperature"].origin) == (0.5, Origin.ASKED)


def test_an_unknown_says_what_it_depends_on() -> None:
    rows = {
        row.setting: row for row in of(f"VLLM_BATCH_INVARIANT=1 {SOUND} --max-num-batched-tokens 8").settings
    }
    assert rows["batch_invariant"].message == "Depends on device."
    rows = {row.setting: row for row in of(f"{SOUND} --logprobs-mode $M").settings}
    assert rows["logprobs_mode"].message == "It cannot be seen from here."


def test_prose_is_wrapped_and_what_is_copied_is_not() -> None:
    long = [line for line in shown(of("vllm serve Q")) if len(line) > 80]
    assert all(line.split()[0] in ("fix", "see") and len(line.split()) <= 3 for line in long), long
    wide = shown(of("vllm serve Q"), width=110)
    assert any(len(line) > 80 for line in wide), "there is prose to be wrapped"
