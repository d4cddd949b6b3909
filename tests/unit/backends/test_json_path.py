from typing import Any

import pytest
from msgspec import UNSET

from zerodrift.backends.json_path import look_up, put

DOCUMENT = {
    "a": {"b.c": 1, "list": [{"id": 1, "deep": [{"x": 2}, {"x": 3}]}, {"id": 4, "deep": []}]},
    "null": None,
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", DOCUMENT),
        ("a/b.c", 1),
        ("null", None),
        ("a/list/1/id", 4),
        ("a/list/*/id", [1, 4]),
        ("a/list/*/deep/*/x", [[2, 3], []]),
        ("a/list/*/deep/0/x", UNSET),
        ("a/list/2", UNSET),
        ("a/list/-1", UNSET),
        ("a/*/id", UNSET),
        ("a/list/*/no", UNSET),
        ("null/further", UNSET),
        ("a/b.c/further", UNSET),
    ],
)
def test_look_up(path, value):
    found = look_up(DOCUMENT, path)
    assert found is UNSET if value is UNSET else found == value


def test_put():
    body: dict[str, Any] = {"kept": 1, "deep": {"kept": 2}}
    put(body, "n", 3)
    put(body, "deep/n", 4)
    put(body, "new/n", 5)
    assert body == {"kept": 1, "n": 3, "deep": {"kept": 2, "n": 4}, "new": {"n": 5}}
