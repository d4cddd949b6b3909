"""The exam is marked by its rules: what counts as detected, as a name, as a place. All faults here are made up."""

import json
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def score(script):
    return script("exam/score")


def fault(**changes):
    return {
        "id": "x1",
        "family": "arithmetic-small",
        "true_names": [],
        "model": "qwen3",
        "located": None,
        "acts": {"how": "forked start, real server"},
    } | changes


def place(**changes):
    return {
        "layer": 1,
        "part": "attention head",
        "index": 3,
        "quantity": "output",
        "estimate": 0.9,
        "r2": 1.0,
    } | changes


def verdict(*causes, outcome="fail", located=()):
    found = [{"cause": name, "gating": True, "located": list(located)} for name in causes]
    return {"verdict": outcome, "causes": [*found, {"cause": "path/rope", "gating": False, "located": []}]}


def made_up(kind):
    """Answers that nobody gave, and their marks."""
    return yaml.safe_load((Path(__file__).parents[1] / "exam" / "answers.yaml").read_text())[kind]


RAN = {"server": "ran", "exit": 1, "seconds": 20.0}


def test_the_halves_are_those_of_the_hashes(score):
    ids = [f"f{number:02}" for number in range(89)]
    halves = score.split(ids)
    assert halves == score.split(reversed(ids))
    assert (len(halves["A"]), len(halves["B"])) == (45, 44)
    assert sorted(halves["A"] + halves["B"]) == ids


def test_a_server_is_started_as_the_key_says_it_was(score):
    key = [fault(id="a"), fault(id="b", acts={"how": "ordinary start, real server"})]
    sittings = {each.name: each.forked for each in score.half(key, "A") if each.fault}
    assert sittings == {"a": True, "b": False}


def test_only_updates_are_asked_for_an_update(score):
    key = [fault(id="a"), fault(id="b", family="updates")]
    sittings = {each.name: each.sync for each in score.half(key, "A")}
    assert sittings == {"a": False, "b": True, **{each.name: each.sync for each in score.HEALTHY}}


@pytest.mark.parametrize(
    ("causes", "name"),
    [
        ((), "none"),
        (("weights/stale",), "right"),
        (("weights/version-label",), "equivalent"),
        (("weights/torn",), "arguable"),
        (("unexplained",), "unexplained"),
        (("path/rope",), "false"),
        (("path/rope", "weights/stale"), "false"),
    ],
)
def test_the_first_cause_is_the_name(score, causes, name):
    assert score.judge_name(fault(true_names=["weights/stale"], arguable=["weights/torn"]), causes) == name


@pytest.mark.parametrize(
    ("truth", "said", "judged"),
    [
        ({"layer": 1, "part": "attention", "head": 3}, [place()], "true"),
        ({"layer": 1, "part": "attention", "head": 2}, [place()], "false"),
        ({"layer": 0, "part": "attention", "head": 3}, [place()], "false"),
        ({"layer": 1, "part": "mlp", "neuron": 3}, [place()], "false"),
        ({"layer": 1, "part": "mlp", "neuron": 3}, [place(part="MLP neuron")], "true"),
        ({"layer": 1, "part": "attention", "head": 3}, [place(), place(layer=0)], "false"),
        (
            {"layer": 1, "part": "attention-scale"},
            [place(part="q norm", index=None, quantity="gain")],
            "true",
        ),
        ({"part": "logits", "tokens": [3, 4]}, [place(layer=None, part="logit of token")], "true"),
        ({"part": "logits", "tokens": [4]}, [place(layer=None, part="logit of token")], "false"),
        ({"layer": "all", "part": "kv"}, [place(layer=None, part="keys in all layers", index=None)], "true"),
        ({"layer": 0, "part": "mlp", "neuron": 7}, [place(alike="layer 0, MLP neuron 7 output")], "true"),
        ({"layer": 0, "part": "mlp", "neuron": 7}, [place(alike="layer 0, MLP neuron 77 output")], "false"),
        ({"layer": 1, "part": "attention", "head": 3}, [place(quantity="scale of scores")], "false"),
        ({"layer": 1, "part": "attention", "head": 3}, [], "none"),
        (None, [place()], "false"),
    ],
)
def test_a_place_is_true_by_layer_part_and_index(score, truth, said, judged):
    assert score.judge_place(fault(located=truth), said) == judged


@pytest.mark.parametrize(("truth", "words", "judged"), made_up("words"))
def test_words_for_a_place(score, truth, words, judged):
    named, _, alike = words.removesuffix(")").partition(" (or ")
    layer, _, rest = named.rpartition(", ")
    part, quantity = rest.rsplit(" ", 1)
    own = {"layer": int(layer.removeprefix("layer ")) if layer else None, "part": part, "index": None}
    one = place(**own, quantity=quantity, alike=alike)
    assert score.judge_place(fault(located=truth), [one]) == judged
    # And the same of a row that was kept as text.
    kept = score.row(fault(located=truth), RAN, verdict("unexplained", located=[one]))._asdict()
    (again,) = score.again([kept | {"fields": [], "place": "false"}], [fault(located=truth)])
    assert again.place == judged


@pytest.mark.parametrize(("truth", "fields", "judged"), made_up("fields"))
def test_fields_for_a_place(score, truth, fields, judged):
    one = place(index=None) | fields
    assert score.judge_place(fault(located=truth), [one]) == judged


def test_every_place_that_is_blamed_must_be_true(score):
    truth = {"layer": 1, "part": "mlp", "channels": [8, 15]}

    def blamed(*rows, **beside):
        each = [place(part="MLP", index=None, rows=pair) for pair in rows]
        each += [place(index=None, **beside)] if beside else []
        return score.judge_place(fault(located=truth), each)

    assert blamed((8, 12)) == "false"
    assert blamed((8, 12), (12, 16)) == "true"
    assert blamed((8, 16), part="MLP", layer=0) == "false"
    assert blamed((8, 16), part="attention") == "false"
    assert blamed((8, 16), part="MLP") == "true"


def test_words_that_are_not_known_are_told(score):
    row = score.row(
        fault(located={"layer": 1, "part": "mlp"}), RAN, verdict("unexplained", located=[place(part="flux")])
    )
    assert row.place == "false"
    assert "flux 3 output" in score.text([row], score.score([row], 1))


def test_the_marker_knows_every_part_of_arithmetic_in_the_keys(score):
    for key in {*score.KEYS.values()}:
        asked = [each for each in score.read_key(score.EXAM / key) if each["family"] in score.ARITHMETIC]
        named = {each["located"]["part"] for each in asked if "part" in each["located"]}
        assert asked
        assert not named - set(score.places.TRUE_SITES), key


def test_a_part_of_a_half_is_said_to_be_the_first_by_hash_or_not(score, script):
    key = [fault(id=f"f{number}") for number in range(6)]
    ordered = score.half(key, "A")
    sit = script("exam/sit")
    first = sit.first(ordered, 2)
    assert [each.name for each in first] == [each.name for each in ordered[: len(score.HEALTHY) + 2]]
    rows = [score.row(fault(id=each.name), RAN, None) for each in first if each.fault]
    assert score.state(rows, key, "A") == "2 of 6 sat, the first by hash"
    assert score.state(rows[1:], key, "A") == "1 of 6 sat, NOT the first by hash"


def test_a_place_is_asked_of_unexplained_arithmetic_alone(score):
    truth = {"layer": 1, "part": "attention", "head": 3}
    said = verdict("unexplained", located=[place()])
    assert score.row(fault(located=truth), RAN, said).place == "true"
    assert score.row(fault(located=truth, family="cache"), RAN, said).place == ""
    assert score.row(fault(located=truth), RAN, verdict("path/rope")).place == ""


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ({"server": "never started"}, "NEVER STARTED"),
        ({"server": "died with 1", "exit": 3}, "INCONCLUSIVE"),
        ({"server": "ran", "exit": None}, "NO ANSWER"),
        ({"server": "ran", "exit": 70}, "EXIT 70"),
    ],
)
def test_no_verdict_is_no_detection(score, outcome, said):
    one = score.row(fault(), outcome, None)
    assert one.verdict == said
    assert score.score([one], 1).detected == 0


def healthy_rows(score, outcome="pass"):
    return [
        score.row(fault(id=each.name, family="healthy"), RAN, {"verdict": outcome, "causes": []})
        for each in score.HEALTHY
    ]


def test_the_bars(score):
    right = score.row(fault(true_names=["path/rope"]), RAN, verdict("path/rope"))
    missed = score.row(fault(), RAN, {"verdict": "pass", "causes": []})
    wrong = score.row(fault(), RAN, verdict("path/rope"))
    lost = score.row(fault(), RAN, verdict("unexplained"))
    well = healthy_rows(score)
    assert score.score([*well, *[right] * 9, missed], 10).passes
    assert not score.score([*well, *[right] * 8, missed, missed], 10).passes
    assert not score.score([*well, *[right] * 9, wrong], 10).passes
    assert not score.score([*well, *[right] * 9, lost], 10).passes
    assert not score.score([*well, *[right] * 9], 10).passes
    assert not score.score([*healthy_rows(score, "fail"), *[right] * 10], 10).passes
    assert not score.score([right] * 10, 10).passes


def test_what_was_sat_is_read_from_disk(score, tmp_path):
    key = [fault(id="a", true_names=["path/rope"]), fault(id="b")]
    run = tmp_path / "a" / "run"
    run.mkdir(parents=True)
    (run / "verdict.json").write_text(json.dumps(verdict("path/rope")))
    assert score.collect(tmp_path, key, "A") == []
    (tmp_path / "a" / "outcome.json").write_text(json.dumps(RAN))
    (row,) = score.collect(tmp_path, key, "A")
    assert (row.id, row.verdict, row.causes, row.name, row.seconds) == (
        "a",
        "FAIL",
        ("path/rope",),
        "right",
        20.0,
    )
