"""The exam is marked by its rules: what counts as detected, as a name, as a place. All faults here are made up."""

import json

import pytest


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
