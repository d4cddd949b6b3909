"""A receipt at each update that passes: before a real server, which takes the update, loses it, or gets another one behind the proxy's back."""

import asyncio
import json
import threading
import time

import pytest
from safetensors.torch import load_file, save_file
from serving import ADMIN, MODEL, serve
from shadowing import shadowing

from zerodrift import models
from zerodrift.cli.main import main
from zerodrift.models.directory import WEIGHTS
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.shadow import receipts as shadow_receipts
from zerodrift.serve.shadow.figures import ShadowFigures
from zerodrift.serve.shadow.receipts import CanariesUnasked, ReceiptState, ShadowReceipts, TakenReceipt
from zerodrift.serve.shadow.versions import EngineVersions
from zerodrift.sync.key import create_key, read_key
from zerodrift.sync.ledger import ReceiptLedger

COMPLETIONS, RECEIPT = "/v1/completions", "x-zerodrift-receipt"
ASK = {"prompt": [5, 6, 7], "max_tokens": 2}
TOKENS = 400


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A, and what is a little larger."""
    found = tmp_path_factory.mktemp("root").resolve()
    a = load_file(models.materialise(MODEL, found / "A") / WEIGHTS)
    for name, factor in {"B": 1.01, "C": 1.02}.items():
        (found / name).mkdir()
        save_file({key: tensor * factor for key, tensor in a.items()}, found / name / WEIGHTS)
    return found


@pytest.fixture
def engine(root):
    yield from serve(root)


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "receipt.key"
    create_key(path)
    return path


@pytest.fixture
def before(engine, root, key, tmp_path):
    """Opens a proxy that takes receipts."""

    def opened(**more):
        told = {
            "receipts": tmp_path / "receipts",
            "receipt_key": key,
            "receipt_tokens": TOKENS,
            "weight_root": root,
            "key": ADMIN,
        }
        return shadowing(engine.url, **told | more)

    return opened


@pytest.fixture
def proxy(before):
    with before() as found:
        yield found


def push(to, directory, label, **more):
    """As vLLM's own client does."""
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"directory": str(directory)} | more}),
        ("/finish_weight_update", {"weight_version": label}),
    ):
        answer = to.admin(path, body)
        assert answer.status == 200, answer.content


def said(proxy):
    answer = proxy.post(COMPLETIONS, ASK)
    assert answer.status == 200, answer.content
    return answer.headers[RECEIPT].partition(" ")


def settled(proxy):
    """What is said in the end, and by which receipt."""
    deadline = time.monotonic() + 60
    while (found := said(proxy))[0] == "pending":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0], found[2]


def ledger(tmp_path, key):
    return ReceiptLedger(tmp_path / "receipts", read_key(key))


def metric(proxy, name):
    lines = proxy.get("/metrics").content.decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"zerodrift_shadow_{name}")), 0)


def counted(proxy, outcome):
    return metric(proxy, f'receipts_total{{outcome="{outcome}"}}')


def test_an_update_that_arrives_is_confirmed_and_answers_carry_its_receipt(
    proxy, root, key, tmp_path, capsys
):
    assert said(proxy)[0] == "started"
    push(proxy, root / "B", "step 1")
    state, name = settled(proxy)
    assert state == "confirmed"
    [receipt] = ledger(tmp_path, key).receipts
    assert (receipt.id, receipt.version.label, receipt.told) == (name, "step 1", "step 1")
    assert receipt.slope == pytest.approx(1, abs=0.01)
    assert (counted(proxy, "confirmed"), metric(proxy, "receipt_confirmed")) == (1, 1)
    with pytest.raises(SystemExit) as stop:
        main(["sync", "status", str(tmp_path / "receipts"), "--key", str(key)])
    assert stop.value.code == 0
    assert "confirmed    step 1 on http://127.0.0.1:" in capsys.readouterr().out


def test_an_update_that_never_arrived_is_missed_and_may_be_sent_again(proxy, engine, root, key, tmp_path):
    """The proxy sees it pass; the engine has the old weights back before anybody generates."""
    proxy.admin("/pause?mode=keep")
    push(proxy, root / "B", "step 1")
    push(engine, root / "A", "step 0 again")
    proxy.admin("/resume")
    assert settled(proxy)[0] == "missed"
    [receipt] = ledger(tmp_path, key).receipts
    assert (receipt.cause, receipt.slope) == ("weights/stale", pytest.approx(0, abs=0.01))
    push(proxy, root / "B", "step 1, sent again")
    assert settled(proxy)[0] == "confirmed"


def test_an_update_of_nothing_is_not_missed(proxy, root):
    push(proxy, root / "A", "step 1")
    assert settled(proxy)[0] == "confirmed"
    assert counted(proxy, "missed") == 0


def test_too_few_canaries_decide_nothing_and_say_how_many_would(before, root, key, tmp_path):
    with before(receipt_tokens=64) as proxy:
        push(proxy, root / "B", "step 1")
        assert settled(proxy)[0] == "inconclusive"
        streamed = proxy.post(COMPLETIONS, ASK | {"stream": True})
    [receipt] = ledger(tmp_path, key).receipts
    assert receipt.needed > 64
    assert streamed.headers[RECEIPT] == f"inconclusive {receipt.id}"
    assert streamed.events


def test_an_update_without_a_label_is_measured_by_its_numbers(proxy, root, key, tmp_path):
    assert proxy.admin("/update_weights", {"weight_dir": str(root / "B")}).status == 200
    assert settled(proxy)[0] == "confirmed"
    [receipt] = ledger(tmp_path, key).receipts
    assert (receipt.version.label, receipt.told) == ("version 1", None)


def test_an_update_that_cannot_be_read_says_so_and_the_next_one_is_measured_over_both(
    proxy, engine, root, key, tmp_path
):
    names = list(load_file(root / "B" / WEIGHTS))
    push(proxy, root / "B", "in parts", names=names)
    assert settled(proxy)[0] == "inconclusive"
    [receipt] = ledger(tmp_path, key).receipts
    assert "in a way that it cannot read" in receipt.message
    assert counted(proxy, "unread") == 1
    push(proxy, root / "C", "step 2")
    assert settled(proxy)[0] == "confirmed"
    assert ledger(tmp_path, key).receipts[-1].parent.label == "version 0"


def test_another_label_is_another_receipt(proxy, root, key, tmp_path):
    push(proxy, root / "B", "step 1")
    settled(proxy)
    assert proxy.admin("/update_weight_version", {"new_version": "step 1, again"}).status == 200
    assert settled(proxy)[0] == "confirmed"
    assert [each.version.label for each in ledger(tmp_path, key).receipts] == ["step 1", "step 1, again"]


def test_one_that_the_next_update_overtakes_is_thrown_away(proxy, root, key, tmp_path, monkeypatch):
    from zerodrift.backends.vllm import VllmBackend

    asked, go_on = threading.Event(), threading.Event()
    score = VllmBackend.score

    def slowly(self, sequences):
        found = score(self, sequences)
        asked.set()
        assert go_on.wait(30)
        return found

    proxy.admin("/pause?mode=keep")  # it waits until it is known what the engine says before any update
    proxy.admin("/resume")
    monkeypatch.setattr(VllmBackend, "score", slowly)
    push(proxy, root / "B", "step 1")
    assert asked.wait(30)
    push(proxy, root / "C", "step 2")
    go_on.set()
    assert settled(proxy)[0] == "confirmed"
    assert [each.version.label for each in ledger(tmp_path, key).receipts] == ["step 2"]
    assert counted(proxy, "overtaken") == 1


def test_where_one_is_required_requests_wait_for_it_and_are_refused_without(before, engine, root):
    with before(requires_receipt=True) as proxy:
        assert said(proxy)[0] == "started"
        push(proxy, root / "B", "step 1")
        assert said(proxy)[0] == "confirmed"  # it has waited
        proxy.admin("/pause?mode=keep")
        push(proxy, root / "C", "step 2")
        push(engine, root / "B", "step 1 again")
        proxy.admin("/resume")
        answer = proxy.post(COMPLETIONS, ASK)
        assert (answer.status, answer.code) == (424, "update/no-receipt")
        assert "weights/stale" in json.loads(answer.content)["error"]["message"]
        push(proxy, root / "C", "step 2, sent again")
        assert said(proxy)[0] == "confirmed"


def test_an_engine_that_is_lost_is_vouched_for_by_nobody(before, root, tmp_path, key):
    servers = serve(root)
    engine = next(servers)
    with shadowing(
        engine.url,
        receipts=tmp_path / "lost",
        receipt_key=key,
        receipt_tokens=TOKENS,
        weight_root=root,
        key=ADMIN,
    ) as proxy:
        push(proxy, root / "B", "step 1")
        assert settled(proxy)[0] == "confirmed"
        next(servers, None)
        deadline = time.monotonic() + 30
        while metric(proxy, "receipt_confirmed"):
            assert proxy.post(COMPLETIONS, ASK).status == 502
            assert time.monotonic() < deadline


class Scripted:
    """Both sides, which come to what a test says: an outcome, or an exception."""

    def __init__(self, *outcomes):
        self.outcomes, self.asked, self.open = list(outcomes), [], []

    def take(self, due):
        self.asked.append((due.version, due.label, due.first))
        found = self.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def leave_open(self, due, why):
        self.open.append(why)
        return TakenReceipt(ReceiptState.INCONCLUSIVE, "open", why)


CONFIRMED = TakenReceipt(ReceiptState.CONFIRMED, "good", "")


def run(scenario, *outcomes):
    """`scenario(versions, receipts, taker)` on a loop whose jobs are done at once, by a reference that holds every version."""

    async def main():
        versions, taker, figures = EngineVersions(), Scripted(*outcomes), ShadowFigures()
        receipts = ShadowReceipts(versions, taker, lambda job: job(versions.number), figures, required=True)
        await scenario(versions, receipts, taker)
        return taker, figures.receipts

    return asyncio.run(main())


def update(versions, receipts, label=None):
    versions.begin()
    receipts.begin()
    versions.end(changed=True)
    receipts.changed(label)
    receipts.look()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(shadow_receipts, "RETRY_S", 0.0)


def test_an_engine_that_cannot_be_asked_is_asked_again_and_told_of_once(at_once):
    async def scenario(versions, receipts, taker):
        await receipts.ready()
        update(versions, receipts, "step 1")
        while not receipts.lets_in:
            await asyncio.sleep(0.001)

    gone = CanariesUnasked("nobody answers")
    taker, counted = run(scenario, None, gone, gone, CONFIRMED)
    assert taker.asked == [(0, None, True), *[(1, "step 1", False)] * 3]
    assert len(taker.open) == 1
    assert counted == {"unasked": 2, "confirmed": 1}


def test_the_first_update_waits_until_the_engine_was_asked_once_more():
    """It came after the proxy, and is there when the update comes."""

    async def scenario(versions, receipts, taker):
        await asyncio.sleep(0.01)
        assert taker.outcomes
        await receipts.ready()
        assert not taker.outcomes
        await receipts.ready()

    taker, _ = run(scenario, CanariesUnasked("nobody answers"), None)
    assert taker.asked == [(0, None, True)] * 2


def test_while_the_engine_is_paused_it_is_not_asked(at_once):
    async def scenario(versions, receipts, taker):
        await receipts.ready()
        versions.pause()
        receipts.begin()
        update(versions, receipts, "step 1")
        await asyncio.sleep(0)
        assert len(taker.asked) == 1
        versions.resume()
        receipts.look()
        await receipts.admit()

    assert run(scenario, None, CONFIRMED)[1] == {"confirmed": 1}


def test_a_taker_that_fails_vouches_for_nothing_and_the_next_one_may():
    async def scenario(versions, receipts, taker):
        await receipts.ready()
        update(versions, receipts)
        with pytest.raises(CallRefused) as refusal:
            await receipts.admit()
        assert refusal.value.status == 424
        update(versions, receipts)
        await receipts.admit()

    assert run(scenario, None, RuntimeError("a bug"), CONFIRMED)[1] == {"failed": 1, "confirmed": 1}


def test_a_request_that_waits_is_let_in_by_the_receipt_and_not_by_the_update():
    async def scenario(versions, receipts, taker):
        await receipts.ready()
        versions.begin()
        receipts.begin()
        waiting = asyncio.create_task(receipts.admit())
        await asyncio.sleep(0.01)
        versions.end(changed=True)
        receipts.changed("step 1")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        receipts.look()
        await waiting
        passage = versions.enter()
        assert receipts.told(passage) == "confirmed good"
        versions.begin()
        assert receipts.told(passage) == "none"

    run(scenario, None, CONFIRMED)
