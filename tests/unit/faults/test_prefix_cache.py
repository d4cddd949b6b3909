from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.prefix_cache import PrefixCachingReference
from zerodrift.faults.registry import inject_all, resolve

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
Same = Callable[[Sequence[Completion], Sequence[Completion]], bool]


def salted(requests: Sequence[Request], salt: str) -> list[Request]:
    return [
        msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, cache_salt=salt))
        for request in requests
    ]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_sound_cache_changes_nothing_but_the_work(
    name: str, request: pytest.FixtureRequest, ask: Ask, tell: Tell, same: Same
) -> None:
    engine: ReferenceBackend = request.getfixturevalue(name)
    cached = PrefixCachingReference(engine)
    asked = ask(9, 40, 100)
    honest = tell(engine.generate(asked))
    cold, warm = tell(cached.generate(asked)), tell(cached.generate(asked))
    assert same(cold, honest)
    assert same(warm, honest)
    assert [each.cached_tokens for each in cold] == [0, 0, 0]
    assert [each.cached_tokens for each in warm] == [0, 32, 96]


def test_hits_are_counted_in_blocks_and_leave_a_token_to_run(
    llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    cached = PrefixCachingReference(llama)
    assert cached.capabilities - llama.capabilities == {
        Capability.CACHE_SALT,
        Capability.CACHED_TOKENS,
        Capability.RESET_CACHE,
    }
    hits = [each.cached_tokens for each in tell(cached.generate(ask(48, n=3, max_tokens=2)))]
    assert hits == [0, 32, 32], "a prompt of three whole blocks still runs the third"
    (longer,) = tell(cached.generate(ask(60, max_tokens=2)))
    assert longer.cached_tokens == 48, "a longer prompt shares the blocks of a shorter one"


def test_salt_and_reset_make_a_cache_cold(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    cached = PrefixCachingReference(llama)
    asked = ask(40, max_tokens=2)
    hits = []
    for requests in (asked, salted(asked, "a"), salted(asked, "a"), salted(asked, "b")):
        hits += [each.cached_tokens for each in tell(cached.generate(requests))]
    assert hits == [0, 0, 32, 0]
    cached.reset_cache()
    assert [each.cached_tokens for each in tell(cached.generate(asked))] == [0]


@pytest.mark.parametrize(("variant", "least"), [("bf16", 1e-5), ("misaligned", 1e-2)])
def test_only_a_warm_prefix_is_wrong(
    variant: str, least: float, llama: ReferenceBackend, ask: Ask, tell: Tell, same: Same
) -> None:
    broken = resolve(f"path/prefix-cache:{variant}").inject(llama)
    asked = ask(9, 40, temperature=1.0)
    honest = tell(llama.generate(asked))
    assert same(tell(broken.generate(asked)), honest)
    short, long = tell(broken.generate(asked))
    assert same([short], honest[:1]), "too short to be cached"
    (scores,) = llama.score([long.sequence])
    assert max(abs(a - b) for a, b in zip(long.logprobs, scores[39:], strict=True)) > least
    assert same(tell(broken.generate(salted(asked, "fresh"))), honest)


def test_a_sound_cache_does_not_survive_an_update(
    fresh: ReferenceBackend, updated: ReferenceBackend, update: Path, ask: Ask, tell: Tell, same: Same
) -> None:
    cached = PrefixCachingReference(fresh)
    cached.generate(ask(40))
    cached.load_weights(update, WeightVersion("new"))
    (completion,) = tell(cached.generate(ask(40)))
    assert completion.cached_tokens == 0
    assert same([completion], tell(updated.generate(ask(40))))


@pytest.mark.parametrize(("variant", "reset_helps"), [("kept", True), ("reset-ignored", False)])
def test_a_stale_prefix_is_reused_after_an_update(
    *,
    variant: str,
    reset_helps: bool,
    updated: ReferenceBackend,
    update: Path,
    ask: Ask,
    tell: Tell,
    same: Same,
) -> None:
    broken = resolve(f"weights/stale-prefix-cache:{variant}").inject(ReferenceBackend("testbed:llama"))
    asked = ask(9, 40)
    broken.generate(asked)
    broken.load_weights(update, WeightVersion("new"))
    honest = tell(updated.generate(asked))
    short, long = tell(broken.generate(asked))
    assert same([short], honest[:1])
    assert not same([long], honest[1:])
    assert long.cached_tokens == 32
    assert long.versions[0].version == updated.version, "it claims the new weights"
    assert same(tell(broken.generate(salted(asked, "new"))), honest)
    broken.reset_cache()
    assert same(tell(broken.generate(asked)), honest) is reset_helps


def test_a_cache_over_a_damaged_model(llama: ReferenceBackend, ask: Ask, tell: Tell, same: Same) -> None:
    both = inject_all(llama, ["path/prefix-cache:bf16", "path/rope"])
    damaged = resolve("path/rope").inject(llama)
    assert same(tell(both.generate(ask(40))), tell(damaged.generate(ask(40))))
