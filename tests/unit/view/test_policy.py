from zerodrift.view.page import content_policy, source_hash


def test_a_known_hash() -> None:
    # The example of the CSP specification: echo -n "alert('Hello, world.');" | openssl dgst -sha256 -binary | base64.
    assert source_hash("alert('Hello, world.');") == "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='"


def test_nothing_but_the_named_scripts_runs() -> None:
    policy = dict(part.split(" ", 1) for part in content_policy(["a", "b"]).split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"{source_hash('a')} {source_hash('b')}"
    assert "unsafe" not in policy["script-src"]
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert set(policy) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
