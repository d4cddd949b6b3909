"""Salts and versions, by themselves: who may find whose keys and values, and whose tokens are of two weights."""

import json

import pytest

from zerodrift.serve.errors import CallRefused
from zerodrift.serve.shadow.salted import salted
from zerodrift.serve.shadow.updates import UpdateTold, told_of
from zerodrift.serve.shadow.versions import EngineVersions


def update(versions):
    versions.begin()
    versions.end(changed=True)


@pytest.fixture
def versions():
    return EngineVersions()


def salt(versions, own=None):
    return versions.salt(versions.enter(), own)


def test_requests_of_one_version_share_their_cache_and_no_others_do(versions):
    before, again = salt(versions), salt(versions)
    update(versions)
    assert before == again != salt(versions)
    assert salt(versions) == salt(versions)
    assert salt(EngineVersions()) != salt(EngineVersions())


def test_what_clients_salt_with_keeps_them_apart(versions):
    told = [salt(versions, own) for own in (None, "a", "b", "=a", "a\0b")]
    assert len({*told}) == len(told)
    assert salt(versions, "a") == told[1]
    assert all(len(each) == 64 and each.isalnum() for each in told)


@pytest.mark.parametrize("state", ["begin", "pause"])
def test_while_nobody_knows_which_weights_will_answer_nobody_shares(versions, state):
    getattr(versions, state)()
    assert salt(versions) != salt(versions)


def test_a_refused_update_keeps_the_version(versions):
    before = salt(versions)
    versions.begin()
    versions.end(changed=False)
    assert salt(versions) == before
    assert versions.number == 0


def test_a_request_that_is_there_during_an_update_is_mixed(versions):
    before = versions.enter()
    gone = versions.enter()
    versions.leave(gone)
    versions.begin()
    meanwhile = versions.enter()
    versions.end(changed=True)
    after = versions.enter()
    assert [each.told for each in (gone, before, meanwhile, after)] == ["0", "0-1 mixed", "0-1 mixed", "1"]
    assert [each.is_mixed for each in (gone, before, meanwhile, after)] == [False, True, True, False]


def test_what_arrives_in_a_pause_is_of_the_version_behind_it(versions):
    running = versions.enter()
    versions.pause()
    waiting = versions.enter()
    update(versions)
    versions.resume()
    assert (running.told, waiting.told) == ("0-1 mixed", "1")
    update(versions)
    assert waiting.told == "1-2 mixed"


def test_a_pause_that_ends_before_the_update_does_protects_nobody(versions):
    versions.pause()
    waiting = versions.enter()
    versions.begin()
    versions.resume()
    versions.end(changed=True)
    assert waiting.is_mixed


def test_an_engine_that_was_lost_has_other_weights(versions):
    before, running = salt(versions), versions.enter()
    versions.pause()
    versions.lose()
    assert salt(versions) != before
    assert running.is_mixed
    assert not versions.paused


def test_nothing_but_the_salt_is_touched():
    body = b'{"prompt": [1,  2], "temperature": 0.10000000000000000001, "n": 1e0, "x": {"a": [null]}}'
    told = salted(body, lambda own: f"s{own}")
    assert (
        told
        == b'{"prompt":[1,  2],"temperature":0.10000000000000000001,"n":1e0,"x":{"a": [null]},"cache_salt":"sNone"}'
    )
    assert json.loads(salted(b'{"cache_salt": "mine"}', lambda own: f"s-{own}")) == {"cache_salt": "s-mine"}
    assert json.loads(salted(b'{"cache_salt": null}', lambda own: f"s-{own}")) == {"cache_salt": "s-None"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"prompt": NaN}',
        b'{"prompt": 1',
        b"\xff",
        b"[" * 100_000,
        b'{"cache_salt": ""}',
        b'{"cache_salt": 5}',
        b'{"cache_salt": "%s"}' % (b"a" * 1025),
    ],
)
def test_what_cannot_be_salted_is_not_passed_on(body):
    with pytest.raises(CallRefused) as refusal:
        salted(body, lambda _: "s")
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("handler", "body", "told"),
    [
        ("update", {"update_info": {"directory": "/a"}}, UpdateTold("/a")),
        ("update", {"update_info": [{"directory": "/a", "names": None}]}, UpdateTold("/a")),
        ("update", {"update_info": {"directory": "/a", "names": ["w"]}}, UpdateTold()),
        ("update", {"update_info": [{"directory": "/a"}, {"directory": "/b"}]}, UpdateTold()),
        ("update", {"update_info": {"names": ["w"], "shapes": [[1]]}}, UpdateTold()),
        ("update", {"weight_dir": "/a"}, UpdateTold("/a")),
        ("update", {"weight_dir": None}, UpdateTold()),
        ("update", {"weight_dir": ["/a"]}, UpdateTold()),
        ("rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/a"}}, UpdateTold("/a")),
        ("rpc", {"method": "other", "kwargs": {"weights_path": "/a"}}, UpdateTold()),
        ("rpc", {"method": "reload_weights", "kwargs": []}, UpdateTold()),
        ("finish", {"weight_version": "step 7"}, UpdateTold(None, "step 7")),
        ("finish", {"weight_version": None}, UpdateTold()),
        ("relabel", {"new_version": "step 7"}, UpdateTold(None, "step 7")),
        ("start", {"weight_version": "step 7"}, UpdateTold()),
        ("finish", [], UpdateTold()),
    ],
)
def test_what_a_control_call_says_of_weights(handler, body, told):
    assert told_of(handler, json.dumps(body).encode()) == told
    assert told_of(handler, b"{") == told_of(handler, b"") == UpdateTold()
