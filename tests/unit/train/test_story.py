"""Which trainings the story has, and that each is the sound one but for what its name says."""

import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.faults.registry import FAULTS
from zerodrift.models.tokenizer_testbed import build
from zerodrift.tasks.sums import ShownSums
from zerodrift.train.compare import differences
from zerodrift.train.planted import faults_of
from zerodrift.train.story import CACHE, CONDITIONS, FROM, HEAD, KV, RAW, chosen, pieces


def test_every_condition_is_the_sound_one_but_for_what_it_says(tmp_path):
    runs = {piece.condition.name: piece.config for piece in pieces(1, tmp_path)}
    said = {name: {key for key, _, _ in differences(runs["sound"], config)} for name, config in runs.items()}
    planted = {"train.inject", "train.inject_from"}
    assert said.pop("exact") == {"train.rollouts"}
    assert said.pop("sound-grpo") == {"train.objective"}
    assert said.pop("raw-grpo") == {"train.objective", *planted}
    assert said.pop("sound") == set()
    assert all(each == planted for each in said.values())
    assert {config.train.inject_from for name, config in runs.items() if config.train.inject} == {FROM}


def test_all_is_every_fault_by_itself_and_each_mend_takes_one_away():
    faults = {condition.name: set(condition.faults) for condition in CONDITIONS}
    assert faults["all"] == {RAW, CACHE, KV, HEAD} <= set(FAULTS)
    assert [faults["all"] - faults["mended-1"], faults["mended-1"] - faults["mended-2"]] == [{RAW}, {CACHE}]
    assert faults["mended-2"] - faults["head"] == {KV}


def test_all_four_can_be_planted_at_once(tmp_path):
    (piece,) = (each for each in pieces(1, tmp_path) if each.condition.name == "all")
    assert [fault.spec for fault in faults_of(piece.config)] == [HEAD, KV, CACHE, RAW]


def test_what_others_are_held_against_is_run_before_them():
    names = [condition.name for condition in CONDITIONS]
    assert all(names.index(each.against) <= names.index(each.name) for each in CONDITIONS)


def test_pieces_have_the_same_seeds_in_every_condition_and_a_name_that_is_none_is_refused(tmp_path):
    found = pieces(2, tmp_path, only=["raw", "sound"])
    assert [piece.directory.name for piece in found] == [
        "sound-seed-0", "sound-seed-1", "raw-seed-0", "raw-seed-1",
    ]  # fmt: skip
    with pytest.raises(InvalidValue, match="no condition 'rwa' in the story; it has sound, raw"):
        chosen(["rwa"])


def test_all_prompts_share_a_block_of_a_prefix_cache():
    assert len(build("llama").encode(ShownSums.before)) == 19
    prompts = [prompt.token_ids for prompt in ShownSums("testbed:llama").prompts(25, 0)]
    assert len({ids[:16] for ids in prompts}) == 1
    assert len(set(prompts)) == 25
