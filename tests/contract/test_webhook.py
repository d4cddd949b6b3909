"""The webhook against a real server: what is sent, when, how long a training waits, and what is never logged."""

import logging
import threading
import time

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.integrations.sinks.webhook import MOST_WAITING, Webhook
from zerodrift.monitor.monitor import Monitor

SECRET = "T0P-SECRET"
PATH = f"/services/{SECRET}"


def decisions(*nats):
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for each in nats:
        behavior = -rng.exponential(1.0, (16, 40)) - 0.5
        old = np.minimum(behavior + rng.normal(0, each, behavior.shape), 0)
        yield monitor.observe(behavior_logprobs=behavior, old_logprobs=old, versions=0, trainer_version=0)


GOOD, BAD, WORSE, HALTED = decisions(0.01, 0.3, 0.3, 0.3)


@pytest.fixture
def webhook(loopback, closing):
    return closing(Webhook(loopback.url + PATH, headers={"authorization": f"Bearer {SECRET}"}, timeout_s=2.0))


def test_only_changes_are_sent(loopback, webhook):
    loopback.routes[f"POST {PATH}"] = lambda *_: (200, {})
    for decision in (GOOD, BAD, WORSE, HALTED, HALTED):
        webhook.emit(decision)
    sent = [call.body for call in loopback.to(PATH)]
    assert [(body["before"], body["state"], body["step"]) for body in sent] == [
        ("OK", "QUARANTINE", 1),
        ("QUARANTINE", "HALT", 3),
    ]
    assert sent[0]["reasons"][0]["code"] == "above-gate"
    assert sent[0]["metrics"]["zerodrift/mismatch/mean_abs"] == BAD.mismatch.mean_abs
    assert loopback.calls[0].headers["authorization"] == f"Bearer {SECRET}"
    assert (webhook.delivered, webhook.failures) == (2, 0)


def test_what_was_refused_is_counted_and_sent_again(loopback, webhook, caplog):
    answers = iter([(500, {}), (200, {})])
    loopback.routes[f"POST {PATH}"] = lambda *_: next(answers)
    with caplog.at_level(logging.DEBUG, logger="zerodrift"):
        webhook.emit(BAD)
        assert (webhook.delivered, webhook.failures) == (0, 1)
        webhook.emit(WORSE)
    assert (webhook.delivered, webhook.failures) == (1, 1)
    assert [call.body["step"] for call in loopback.calls] == [1, 1]
    assert "500" in caplog.text
    assert SECRET not in caplog.text


def test_a_halt_that_was_not_delivered_is_sent_at_the_end(loopback):
    answers = iter([(503, {}), (200, {})])
    loopback.routes[f"POST {PATH}"] = lambda *_: next(answers)
    webhook = Webhook(loopback.url + PATH)
    webhook.emit(HALTED)
    webhook.close()
    assert (webhook.delivered, webhook.failures) == (1, 1)


def test_what_happened_while_nobody_answered_comes_in_order_once_somebody_does(loopback, webhook):
    down = [True]
    loopback.routes[f"POST {PATH}"] = lambda *_: (503 if down[0] else 200, {})
    for decision in (BAD, HALTED, GOOD, BAD):
        webhook.emit(decision)
    assert webhook.delivered == 0
    before = len(loopback.calls)
    assert before == 4  # one attempt for each decision, however many wait
    down[0] = False
    webhook.emit(BAD)
    sent = [call.body for call in loopback.to(PATH)][before:]
    assert [(body["before"], body["state"], body["step"]) for body in sent] == [
        ("OK", "QUARANTINE", 1),
        ("QUARANTINE", "HALT", 3),
        ("HALT", "OK", 0),
        ("OK", "QUARANTINE", 1),
    ]
    assert all("dropped" not in body for body in sent)
    assert (webhook.delivered, webhook.failures) == (4, 4)


def test_so_many_changes_wait_and_the_oldest_are_dropped_and_counted(loopback, webhook, caplog):
    down = [True]
    loopback.routes[f"POST {PATH}"] = lambda *_: (503 if down[0] else 200, {})
    with caplog.at_level(logging.WARNING):
        for place in range(MOST_WAITING + 7):
            webhook.emit((BAD, GOOD)[place % 2])
    assert "dropped" in caplog.text
    before, down[0] = len(loopback.calls), False
    webhook.emit((BAD, GOOD)[(MOST_WAITING + 6) % 2])
    sent = [call.body for call in loopback.to(PATH)][before:]
    assert len(sent) == MOST_WAITING
    assert sent[0]["dropped"] == 7
    assert "7 changes before this one were dropped" in sent[0]["text"]
    assert all("dropped" not in body for body in sent[1:])
    assert (webhook.delivered, webhook.dropped) == (MOST_WAITING, 7)


def test_an_answer_that_came_late_is_an_answer(loopback, closing):
    """It was delivered, though nobody waited for it: once more would be twice."""
    let_go, asked = threading.Event(), []

    def slow(*_):
        asked.append(1)
        let_go.wait(5)
        return 200, {}

    loopback.routes[f"POST {PATH}"] = slow
    webhook = closing(Webhook(loopback.url + PATH, timeout_s=0.2))
    webhook.emit(BAD)
    assert webhook.delivered == 0
    let_go.set()
    webhook._running.join(5)
    webhook.emit(HALTED)
    assert [call.body["state"] for call in loopback.to(PATH)] == ["QUARANTINE", "HALT"]
    assert webhook.delivered == 2


def test_all_that_waits_is_sent_at_the_end(loopback):
    down = [True]
    loopback.routes[f"POST {PATH}"] = lambda *_: (503 if down[0] else 200, {})
    webhook = Webhook(loopback.url + PATH)
    for decision in (BAD, HALTED, GOOD):
        webhook.emit(decision)
    down[0] = False
    webhook.close()
    assert webhook.delivered == 3


def test_a_server_that_drips_holds_a_training_no_longer_than_the_timeout(loopback, closing, caplog):
    """Each byte comes in time, so no timeout of a single operation would end it."""
    let_go = threading.Event()

    def drip(_, handler):
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        while not let_go.wait(0.05):
            handler.wfile.write(b".")
            handler.wfile.flush()
        handler.close_connection = True

    loopback.routes[f"POST {PATH}"] = drip
    webhook = closing(Webhook(loopback.url + PATH, timeout_s=0.3))
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        webhook.emit(BAD)
        waited = time.monotonic() - began
        webhook.emit(BAD)  # the first is still on its way: this one does not wait at all
        again = time.monotonic() - began - waited
    let_go.set()
    assert 0.3 <= waited < 1.3
    assert again < 0.3
    assert webhook.failures == 2
    assert webhook.delivered == 0
    assert SECRET not in caplog.text


def test_nobody_there_is_counted_and_the_address_stays_unsaid(closing, caplog):
    webhook = closing(Webhook(f"http://127.0.0.1:9/{SECRET}", timeout_s=2.0))
    with caplog.at_level(logging.DEBUG, logger="zerodrift"):
        webhook.emit(BAD)
    assert webhook.failures == 1
    assert "127.0.0.1" in caplog.text
    assert SECRET not in caplog.text + repr(webhook)


@pytest.mark.parametrize("url", [SECRET, f"ftp://host/{SECRET}", f"http:///{SECRET}", ""])
def test_what_is_no_address_is_refused_without_being_shown(url):
    with pytest.raises(InvalidValue) as refused:
        Webhook(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_time(timeout_s):
    with pytest.raises(InvalidValue):
        Webhook("http://127.0.0.1:9", timeout_s=timeout_s)
