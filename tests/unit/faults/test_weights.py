"""Faults of updates and caches: what is held afterwards is, tensor by tensor, what the fault says."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.faults.support import NEW, Elsewhere, ask, outputs, same, told

from zerodrift import models
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.delivery import read_checkpoint
from zerodrift.faults.prefix_cache import PrefixCachingReference
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import innermost, the_reference
from zerodrift.weights.digest import checkpoint_state

Tensors = dict[str, torch.Tensor]
IDS = tuple(range(4, 60))
LAYER = "model.layers.{}."


def held_by(engine: Any) -> Tensors:
    return {name: tensor.float() for name, tensor in checkpoint_state(innermost(engine).model).items()}


def exchanged(name: str, one: str, other: str) -> str:
    return name.replace(one, "#").replace(other, one).replace("#", other)


def layer(number: int) -> Callable[[str], bool]:
    return lambda name: name.startswith(LAYER.format(number))


@pytest.mark.parametrize(
    ("variant", "kept"),
    [
        ("first-layer", layer(0)),
        ("middle-layer", layer(1)),
        ("last-layer", layer(1)),
        ("norms", lambda name: "norm" in name),
        ("one-matrix", lambda name: name == "model.layers.1.mlp.down_proj.weight"),
        ("torn", lambda name: name.startswith((LAYER.format(1), "model.norm"))),
    ],
)
def test_a_part_stays_as_it_was_for_good(variant, kept, fresh, update, tmp_path):
    before, broken = held_by(fresh), resolve(f"weights/partial:{variant}").inject(fresh)
    again = models.materialise("testbed:llama", tmp_path / "again")
    twice = {name: tensor * 1.1 for name, tensor in read_checkpoint(update).items()}
    save_file(twice, again / "model.safetensors", metadata={"format": "pt"})
    for directory in (update, again):
        broken.load_weights(directory, NEW)
        sent, after = read_checkpoint(directory), held_by(broken)
        assert 0 < sum(map(kept, sent)) < len(sent)
        for name in sent:
            assert torch.equal(after[name], before[name] if kept(name) else sent[name]), name
    broken.close()


@pytest.mark.parametrize(
    ("spec", "arrives"),
    [
        ("weights/swapped:gate-up", lambda sent, name: sent[exchanged(name, "gate_", "up_")]),
        (
            "weights/swapped:key-value",
            lambda sent, name: sent[exchanged(name, "k_proj", "v_proj") if layer(0)(name) else name],
        ),
        ("weights/swapped:layers", lambda sent, name: sent[exchanged(name, "layers.0", "layers.1")]),
        ("weights/dtype", lambda sent, name: sent[name].bfloat16().float()),
    ],
)
def test_something_else_arrives(spec, arrives, fresh, update):
    broken, sent = resolve(spec).inject(fresh), read_checkpoint(update)
    broken.load_weights(update, NEW)
    after = held_by(broken)
    assert all(torch.equal(after[name], arrives(sent, name)) for name in sent)
    assert any(not torch.equal(after[name], sent[name]) for name in sent)
    broken.close()


@pytest.mark.parametrize(
    ("variant", "tensor", "first", "last"),
    [
        ("upper-half-of-the-head", "model.embed_tokens.weight", 0.5, 1.0),
        ("some-queries", "model.layers.0.self_attn.q_proj.weight", 0.25, 0.625),
    ],
)
def test_some_rows_stay_as_they_were(variant, tensor, first, last, fresh, update):
    """The head is tied here, so it is the embedding's rows that stay."""
    before, broken = held_by(fresh), resolve(f"weights/rows:{variant}").inject(fresh)
    broken.load_weights(update, NEW)
    sent, after = read_checkpoint(update), held_by(broken)
    rows = slice(int(first * len(sent[tensor])), int(last * len(sent[tensor])))
    assert torch.equal(after[tensor][rows], before[tensor][rows])
    assert not torch.equal(sent[tensor][rows], before[tensor][rows])
    after[tensor][rows] = sent[tensor][rows]
    assert all(torch.equal(after[name], sent[name]) for name in sent)
    broken.close()


@pytest.mark.parametrize(
    ("spec", "share"),
    [("weights/fraction", 0.83), ("weights/multiple", 2.0), ("weights/multiple:1.4-times", 1.4)],
)
def test_another_share_of_the_update_is_applied(spec, share, fresh, update):
    before, broken = held_by(fresh), resolve(spec).inject(fresh)
    broken.load_weights(update, NEW)
    sent, after = read_checkpoint(update), held_by(broken)
    for name, tensor in sent.items():
        torch.testing.assert_close(
            after[name] - before[name], share * (tensor - before[name]), rtol=0, atol=1e-5
        )
    assert any((tensor - before[name]).abs().max() > 1e-3 for name, tensor in sent.items())
    broken.close()


@pytest.mark.parametrize("spec", ["weights/stale", "weights/version-label"])
def test_nothing_is_delivered(spec, fresh, llama, updated, update):
    broken = resolve(spec).inject(fresh)
    broken.load_weights(update, NEW)
    (completion,), (old,) = told(broken.generate(ask(9))), told(llama.generate(ask(9)))
    assert outputs([completion]) == outputs([old])
    claimed = (llama if spec == "weights/stale" else updated).version
    assert completion.versions[0].version == completion.lineage[0].version == claimed


def test_the_rewritten_checkpoint_goes_when_the_engine_closes(fresh, update, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = (update / "model.safetensors").read_bytes()
    broken = resolve("weights/swapped").inject(fresh)
    broken.load_weights(update, NEW)
    broken.load_weights(update, NEW)
    (left,) = tmp_path.iterdir()
    assert {path.name for path in left.iterdir()} == {path.name for path in update.iterdir()}
    broken.close()
    assert not list(tmp_path.iterdir())
    assert (update / "model.safetensors").read_bytes() == before


def test_an_engine_from_a_directory_keeps_parts_of_that_directory(with_defaults, update):
    engine = ReferenceBackend(with_defaults.spec)
    before = held_by(engine)
    broken = resolve("weights/partial:norms").inject(engine)
    broken.load_weights(update, NEW)
    assert torch.equal(held_by(broken)["model.norm.weight"], before["model.norm.weight"])
    broken.close()


def test_a_checkpoint_in_which_a_fault_cannot_act_is_refused(fresh, tmp_path):
    narrow = models.materialise("testbed:llama", tmp_path / "narrow", dtype="bfloat16")
    other = models.materialise("testbed:qwen3", tmp_path / "other")
    for spec, directory in (("weights/dtype", narrow), ("weights/partial", other)):
        with pytest.raises(InvalidValue):
            resolve(spec).inject(fresh).load_weights(directory, NEW)


def test_a_stranger_claims_the_version_it_was_given(llama, update):
    given = WeightVersion("new", "a digest")
    broken = resolve("weights/version-label").inject(Elsewhere(llama))
    broken.load_weights(update, given)
    (completion,) = told(broken.generate(ask(9)))
    assert completion.versions[0].version == given
    assert broken.fingerprint().semantic["weights"] == "a digest"


def test_the_head_stays_behind_for_good(llama, updated, update):
    broken = resolve("weights/tied-head").inject(llama)
    for _ in range(2):
        broken.load_weights(update, NEW)
        model = the_reference(broken).model
        assert torch.equal(model.get_output_embeddings().weight, llama.model.get_output_embeddings().weight)
        for name, tensor in updated.model.base_model.state_dict().items():
            assert torch.equal(model.base_model.state_dict()[name], tensor), name


def test_one_replica_in_eight_is_stale(fresh, llama, updated, update):
    broken = resolve("weights/replica").inject(fresh)
    asked = ask(*range(5, 14), max_tokens=3)
    assert same(told(broken.generate(asked)), told(llama.generate(asked)))
    broken.load_weights(update, NEW)
    # Nine requests were served: the next nine are turns 9 to 17, and turn 11 falls to the stale one.
    expected = told(updated.generate(asked))
    expected[2] = told(llama.generate(asked))[2]
    assert same(told(broken.generate(asked)), expected)
    old, new = llama.score([IDS])[0], updated.score([IDS])[0]
    scores = broken.score([IDS] * 8)
    assert [sum(each == pytest.approx(right, abs=1e-4) for each in scores) for right in (old, new)] == [1, 7]


# The prefix cache: sound by default, and a host for its faults.


def salted(requests: Sequence[Request], salt: str) -> list[Request]:
    return [
        msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, cache_salt=salt))
        for request in requests
    ]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_sound_cache_changes_nothing_but_the_work(name, request):
    engine: ReferenceBackend = request.getfixturevalue(name)
    cached, asked = PrefixCachingReference(engine), ask(9, 40, 100)
    added = {Capability.CACHE_SALT, Capability.CACHED_TOKENS, Capability.RESET_CACHE}
    assert cached.capabilities - engine.capabilities == added
    honest = told(engine.generate(asked))
    for hits in ([0, 0, 0], [0, 32, 96]):
        completions = told(cached.generate(asked))
        assert same(completions, honest)
        assert [each.cached_tokens for each in completions] == hits


def test_hits_are_blocks_of_the_same_salt_since_the_last_reset(llama):
    cached = PrefixCachingReference(llama)

    def hits(requests):
        return [each.cached_tokens for each in told(cached.generate(requests))]

    # A prompt of three whole blocks still runs the third; a longer prompt shares the blocks of a shorter one.
    assert hits(ask(48, n=3, max_tokens=2)) == [0, 32, 32]
    long = ask(60, max_tokens=2)
    salts = (long, salted(long, "a"), salted(long, "a"), salted(long, "b"))
    assert [hits(requests) for requests in salts] == [[48], [0], [48], [0]]
    cached.reset_cache()
    assert hits(long) == [0]


@pytest.mark.parametrize(("variant", "least"), [("bf16", 1e-5), ("misaligned", 1e-2)])
def test_only_a_warm_prefix_is_wrong(variant, least, llama):
    broken = resolve(f"path/prefix-cache:{variant}").inject(llama)
    asked = ask(9, 40, temperature=1.0)
    honest = told(llama.generate(asked))
    assert same(told(broken.generate(asked)), honest)
    short, long = told(broken.generate(asked))
    assert same([short], honest[:1]), "too short to be cached"
    (scores,) = llama.score([long.sequence])
    assert max(abs(a - b) for a, b in zip(long.logprobs, scores[39:], strict=True)) > least
    assert same(told(broken.generate(salted(asked, "fresh"))), honest)


@pytest.mark.parametrize(
    ("spec", "wrong", "wrong_after_reset"),
    [
        (None, False, False),
        ("weights/stale-prefix-cache:kept", True, False),
        ("weights/stale-prefix-cache:reset-ignored", True, True),
    ],
)
def test_a_prefix_from_before_an_update(spec, *, wrong, wrong_after_reset, fresh, updated, update):
    broken = resolve(spec).inject(fresh) if spec else PrefixCachingReference(fresh)
    asked = ask(9, 40)
    broken.generate(asked)
    broken.load_weights(update, NEW)
    honest = told(updated.generate(asked))
    short, long = told(broken.generate(asked))
    assert same([short], honest[:1])
    assert same([long], honest[1:]) is not wrong
    assert long.cached_tokens == (32 if wrong else 0)
    assert long.versions[0].version == updated.version, "it claims the new weights"
    assert same(told(broken.generate(salted(asked, "new"))), honest)
    broken.reset_cache()
    assert same(told(broken.generate(asked)), honest) is not wrong_after_reset
