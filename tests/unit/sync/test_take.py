"""Receipts of the exact engine, whose trainer is vanilla transformers: two sides that round differently."""

import copy

import msgspec
import pytest
import torch

from zerodrift import models
from zerodrift.backends.exact import ExactBackend
from zerodrift.core.errors import OutOfOrder
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.sync.canary import random_canary
from zerodrift.sync.judge import Arrival
from zerodrift.sync.ledger import ReceiptLedger, require_receipt
from zerodrift.sync.measure import trainer_scores
from zerodrift.sync.shards import VOCABULARY, TensorCut, cuts, shard
from zerodrift.sync.take import ReceiptTaker
from zerodrift.weights.digest import checkpoint_state

SPEC = "testbed:qwen3"
RATE = 1e-5


@pytest.fixture(scope="module")
def engine():
    return ExactBackend(SPEC)


@pytest.fixture(scope="module")
def versions():
    """A, and what one step of AdamW makes of it."""
    before = models.load(SPEC)
    after = copy.deepcopy(before).train()
    ids = torch.tensor(random_canary(before.config.vocab_size, 64, seed=1).sequences)
    after(ids, labels=ids).loss.backward()
    torch.optim.AdamW(after.parameters(), lr=RATE, weight_decay=0).step()
    after.zero_grad()
    return before, after.eval()


@pytest.fixture
def taker(engine, versions, tmp_path):
    engine.engine.swap_weights(versions[0].state_dict(), "step 0")
    canary = random_canary(versions[0].config.vocab_size, 640, avoid=(0, 1, 2, 3))
    taker = ReceiptTaker(engine, canary, ReceiptLedger(tmp_path, bytes(32)))
    taker.start(versions[0], "step 0")
    return taker


def mixed(versions, *missing):
    """The new weights, but for tensors whose names begin so."""
    old, new = (checkpoint_state(each) for each in versions)
    return {name: old[name] if name.startswith(missing) else new[name] for name in new}


def test_an_update_that_arrived(taker, versions):
    taker.engine.engine.swap_weights(versions[1].state_dict(), "step 1")
    receipt = taker.take(versions[1], "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.CONFIRMED, None)
    assert receipt.slope == pytest.approx(1, abs=0.05)
    assert receipt.engine_digest == receipt.version.digest
    assert (receipt.told, receipt.parent.label) == ("step 1", "step 0")
    [answer] = taker.engine.generate([_request()])
    [stamped] = taker.ledger.stamp(answer.completions, "0")
    assert require_receipt([stamped], taker.ledger) == list(answer.completions)


def _request():
    from zerodrift.core.request import Prompt, Request, SamplingParams

    return Request(Prompt((5, 6)), SamplingParams(max_tokens=2, seed=0))


@pytest.mark.parametrize(
    ("label", "cause"), [("step 0", "weights/stale"), ("step 1", "weights/version-label")]
)
def test_an_update_that_never_arrived(taker, versions, label, cause):
    taker.engine.engine.swap_weights(versions[0].state_dict(), label)
    receipt = taker.take(versions[1], "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, cause)
    assert receipt.slope == 0


def test_a_layer_that_is_missing_and_the_update_sent_again(taker, versions):
    taker.engine.engine.swap_weights(mixed(versions, "model.layers.1."), "step 1")
    receipt = taker.take(versions[1], "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/partial")
    assert receipt.message.endswith(": layer 1")
    assert receipt.engine_digest != receipt.version.digest

    taker.engine.engine.swap_weights(versions[1].state_dict(), "step 1 again")
    again = taker.take(versions[1], WeightVersion("step 1 again"))
    assert (again.arrival, again.follows) == (Arrival.CONFIRMED, receipt.id)
    assert again.parent.label == "step 0"


def test_one_rank_of_two_is_missing(taker, versions):
    """What an engine computes whose tensors are cut, and of which the second has kept its pieces."""
    old, torn = (checkpoint_state(copy.deepcopy(each)) for each in versions)
    for name, cut in cuts(versions[1]).items():
        if name in torn:
            shard(torn[name], cut, 1, 2).copy_(shard(old[name], cut, 1, 2))
    taker.engine.engine.swap_weights(torn, "step 1")
    taker.ranks = 2
    receipt = taker.take(versions[1], "step 1")
    assert (receipt.arrival, receipt.cause) == (Arrival.MISSED, "weights/rows")
    assert "rank 1 of 2" in receipt.message


def test_ranks_have_all_of_a_tensor_once(versions):
    state = versions[0].state_dict()
    cut = cuts(versions[0])
    assert {name for name in state.keys() - cut.keys() if "norm" not in name} == set()
    for name in cut:
        pieces = [shard(state[name], cut[name], rank, 3) for rank in range(3)]
        assert torch.equal(torch.cat(pieces, dim=cut[name].dim), state[name])


def test_a_vocabulary_is_cut_in_steps_of_64_rows():
    rows = [len(shard(torch.empty(130, 1), TensorCut(0, VOCABULARY), rank, 2)) for rank in range(2)]
    assert rows == [96, 34]


def test_an_update_of_nothing(taker, versions):
    taker.engine.engine.swap_weights(versions[0].state_dict(), "step 1")
    assert taker.take(versions[0], "step 1").arrival is Arrival.CONFIRMED


@pytest.mark.parametrize(("lost", "arrival"), [(False, Arrival.CONFIRMED), (True, Arrival.MISSED)])
def test_the_old_weights_sent_to_go_back(taker, versions, lost, arrival):
    """Behind an update that was not confirmed: nothing is to change since the last that was, which a lost one shows as well."""
    taker.engine.engine.swap_weights(versions[1].state_dict(), "step 0")
    assert taker.take(versions[1], "step 1").arrival is Arrival.MISSED
    taker.engine.engine.swap_weights(versions[lost].state_dict(), "step 2")
    receipt = taker.take(versions[0], "step 2")
    assert (receipt.arrival, receipt.parent.label) == (arrival, "step 1")


def test_the_old_weights_behind_ones_that_nobody_measured(taker, versions):
    taker.hold(WeightVersion("step 1", "1" * 64))
    taker.engine.engine.swap_weights(versions[0].state_dict(), "step 2")
    assert taker.take(versions[0], "step 2").arrival is Arrival.INCONCLUSIVE
    # The way out: an update that moves something.
    taker.engine.engine.swap_weights(versions[1].state_dict(), "step 3")
    assert taker.take(versions[1], "step 3").arrival is Arrival.CONFIRMED
    taker.hold(WeightVersion("step 4"))
    assert taker.take(versions[1], "step 3").arrival is Arrival.INCONCLUSIVE


class LikeAServer:
    """The exact engine, of which nothing is seen but labels, behind a prefix cache that is emptied by hand."""

    def __init__(self, backend):
        self._backend, self.cache = backend, set()

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def generate(self, requests):
        [answer] = self._backend.generate(requests)
        [made] = answer.completions
        asked = (made.prompt_token_ids, requests[0].prompt.cache_salt)
        spans = tuple(
            VersionSpan(WeightVersion(each.version.label), each.start, each.end) for each in made.versions
        )
        made = msgspec.structs.replace(
            made, cached_tokens=288 if asked in self.cache else 0, versions=spans, lineage=()
        )
        self.cache.add(asked)
        return [msgspec.structs.replace(answer, completions=(made,))]


@pytest.fixture
def like_a_server(taker, versions):
    taker.engine = LikeAServer(taker.engine)
    taker.start(versions[0], "step 0")
    return taker


def test_a_receipt_that_is_taken_once_more_blames_no_cache_that_the_first_filled(like_a_server, versions):
    like_a_server.engine.engine.swap_weights(versions[1].state_dict(), "step 1")
    like_a_server.engine.cache.clear()
    assert like_a_server.take(versions[1], "step 1").arrival is Arrival.CONFIRMED
    assert like_a_server.take(versions[1], "step 1").arrival is Arrival.CONFIRMED
    # The next update leaves it as it is.
    like_a_server.engine.engine.swap_weights(versions[0].state_dict(), "step 2")
    assert like_a_server.take(versions[0], "step 2").cause == "weights/stale-prefix-cache"


def test_a_cache_that_outlived_an_update_does_so_until_it_is_emptied(like_a_server, versions):
    like_a_server.engine.engine.swap_weights(versions[1].state_dict(), "step 1")
    for _ in range(2):
        assert like_a_server.take(versions[1], "step 1").cause == "weights/stale-prefix-cache"
    like_a_server.engine.cache.clear()
    assert like_a_server.take(versions[1], "step 1").arrival is Arrival.CONFIRMED


def test_the_trainers_model_is_left_as_it_was(taker, versions):
    before = {name: tensor.clone() for name, tensor in versions[1].state_dict().items()}
    versions[1].train()
    taker.take(versions[1], "step 1")
    assert versions[1].training
    versions[1].eval()
    assert all(torch.equal(before[name], tensor) for name, tensor in versions[1].state_dict().items())


def test_a_receipt_before_the_start(engine, versions, tmp_path):
    canary = random_canary(versions[0].config.vocab_size, 64)
    with pytest.raises(OutOfOrder):
        ReceiptTaker(engine, canary, ReceiptLedger(tmp_path, bytes(32))).take(versions[0], "step 1")


def test_predictions_are_those_of_fp32_arithmetic(versions):
    """Of weights in bf16: computed in bf16, most of a prediction would be rounding."""
    sent = copy.deepcopy(versions[0]).to(torch.bfloat16)
    canary = random_canary(versions[0].config.vocab_size, 64)
    found = trainer_scores(sent, canary)
    assert found.tolist() == trainer_scores(copy.deepcopy(sent).float(), canary).tolist()
    assert next(sent.parameters()).dtype is torch.bfloat16
