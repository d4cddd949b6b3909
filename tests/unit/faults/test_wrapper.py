from collections.abc import Callable
from typing import Any

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.registry import inject_all, resolve
from zerodrift.faults.wrapper import clone, fact_of, host_in, innermost


def test_the_engine_beneath_is_found(llama: ReferenceBackend, elsewhere: Callable[..., Any]) -> None:
    wrapped = inject_all(llama, ["semantic/seed", "semantic/eos"])
    assert innermost(wrapped) is llama
    assert fact_of(wrapped, "vocab_size") == 512
    stranger = elsewhere()
    assert innermost(resolve("semantic/seed").inject(stranger)) is stranger
    assert fact_of(stranger, "vocab_size") is None


def test_an_engine_of_ours_is_inside_only_of_what_acts_inside(llama: ReferenceBackend) -> None:
    damaged = resolve("path/rope").inject(llama)
    assert isinstance(host_in(damaged), ReferenceBackend)
    assert host_in(resolve("semantic/seed").inject(damaged)) is None


def test_a_clone_shares_weights_and_nothing_that_changes(llama: ReferenceBackend) -> None:
    damaged = resolve("path/rope").inject(llama)
    twin = clone(damaged)
    ours, theirs = host_in(damaged), host_in(twin)
    assert ours is not theirs
    assert ours is not None
    assert theirs is not None
    assert ours.model is theirs.model
