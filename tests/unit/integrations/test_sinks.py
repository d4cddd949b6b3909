"""Files and endpoints that decisions are written to."""

import contextlib
import json
import logging
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, MissingExtra
from zerodrift.integrations.metrics import metrics_of
from zerodrift.integrations.sinks import tensorboard
from zerodrift.integrations.sinks.base import Sinks
from zerodrift.integrations.sinks.jsonl import Jsonl, Line
from zerodrift.integrations.sinks.prometheus import COUNTERS, GAUGES, NAMES, Prometheus
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor

DASHBOARD = Path(__file__).parents[3] / "docs/grafana/zerodrift.json"


def decisions(*nats):
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for each in nats:
        behavior = -rng.exponential(1.0, (16, 40)) - 0.5
        old = np.minimum(behavior + rng.normal(0, each, behavior.shape), 0)
        yield monitor.observe(behavior_logprobs=behavior, old_logprobs=old, versions=0, trainer_version=0)


GOOD, BAD = decisions(0.01, 0.3)


def lines(path):
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("fsync", [False, True])
def test_jsonl_has_a_line_for_each_step_and_appends(tmp_path, fsync):
    path = tmp_path / "new" / "z.jsonl"
    for decision in (GOOD, BAD):
        sink = Jsonl(path, fsync=fsync)
        sink.emit(decision)
        sink.close()
    found = lines(path)
    assert [(line.step, line.state, line.train) for line in found] == [
        (0, "OK", True),
        (1, "QUARANTINE", False),
    ]
    assert found[1].reasons == BAD.reasons
    assert found[1].metrics == metrics_of(BAD)


def test_jsonl_flushes_to_the_disk_when_asked_and_only_then(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    for fsync, count in ((False, 0), (True, 1)):
        with contextlib.closing(Jsonl(tmp_path / "z.jsonl", fsync=fsync)) as sink:
            sink.emit(GOOD)
        assert len(flushed) == count


def test_jsonl_is_not_harmed_by_a_torn_line(tmp_path):
    path = tmp_path / "z.jsonl"
    path.write_bytes(b'{"step": 1, "sta')
    sink = Jsonl(path)
    sink.emit(GOOD)
    sink.close()
    torn, whole = path.read_bytes().splitlines()
    assert torn == b'{"step": 1, "sta'
    assert msgspec.json.decode(whole, type=Line).step == 0


def samples(text):
    """Name with labels, and value, of every sample."""
    found = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in found}


def test_prometheus_has_the_last_decision_and_counts_since_the_start(tmp_path):
    path = tmp_path / "zerodrift.prom"
    sink = Prometheus(path)
    for decision in (GOOD, BAD, BAD):
        sink.emit(decision)
    found = samples(path.read_text())
    assert found["zerodrift_mismatch_mean_abs"] == BAD.mismatch.mean_abs
    assert found["zerodrift_step"] == 1
    assert found['zerodrift_batches_total{state="QUARANTINE"}'] == 2
    assert found['zerodrift_batches_total{state="OK"}'] == 1
    assert found['zerodrift_reasons_total{code="above-gate"}'] >= 2
    assert found['zerodrift_reasons_total{code="not-finite"}'] == 0
    assert "zerodrift_staleness_mean_abs" not in found
    assert [each.name for each in tmp_path.iterdir()] == ["zerodrift.prom"]


def test_prometheus_exports_no_name_that_is_not_declared():
    sink = Prometheus("unused.prom")
    sink._path = None
    sink.emit(BAD)
    assert {name.partition("{")[0] for name in samples(sink.text)} <= NAMES
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", sink.text, re.MULTILINE))
    assert {name for name, kind in typed.items() if kind == "counter"} == set(COUNTERS)
    assert {name for name, kind in typed.items() if kind == "gauge"} <= set(GAUGES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in NAMES)


def test_prometheus_text_is_read_by_its_own_parser():
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    sink = Prometheus("unused.prom")
    sink._path = None
    sink.emit(BAD)
    families = {family.name: family for family in parser.text_string_to_metric_families(sink.text)}
    assert families["zerodrift_batches"].type == "counter"
    assert len(families["zerodrift_batches"].samples) == len(State)
    assert len(families["zerodrift_reasons"].samples) == len(Code)
    assert families["zerodrift_mismatch_k3"].samples[0].value == BAD.mismatch.k3


def test_prometheus_answers_a_scrape_on_loopback_and_nothing_else():
    sink = Prometheus(port=0)
    try:
        sink.emit(GOOD)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5) as reply:
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert reply.read().decode() == sink.text
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/", timeout=5)
        assert refused.value.code == 404
        refused.value.close()
    finally:
        sink.close()


@pytest.mark.parametrize("given", [{}, {"path": "metrics.txt"}])
def test_prometheus_that_nobody_would_read_is_refused(given):
    with pytest.raises(InvalidValue):
        Prometheus(**given)


def asked(dashboard):
    """Every metric that a query names."""
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return {name for query in queries for name in re.findall(r"\bzerodrift_\w+", query)}


def test_the_dashboard_asks_only_for_what_is_exported():
    dashboard = json.loads(DASHBOARD.read_text())
    names = asked(dashboard)
    assert len(names) > 15
    assert names <= NAMES
    assert all(panel["targets"] for panel in dashboard["panels"])


def test_a_query_for_something_else_would_be_seen():
    panel = {"targets": [{"expr": 'rate(zerodrift_gone_total{job="a"}[5m])'}]}
    assert asked({"panels": [panel], "templating": {"list": []}}) - NAMES == {"zerodrift_gone_total"}


def test_tensorboard_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard, "WRITER", "torch.utils.nowhere")
    with pytest.raises(MissingExtra) as refused:
        tensorboard.TensorBoard(tmp_path)
    assert "torch.utils.nowhere" in str(refused.value)


def test_tensorboard_gets_every_number(monkeypatch, tmp_path):
    written = {}

    class Module:
        class SummaryWriter:
            def __init__(self, directory):
                written["directory"] = directory

            def add_scalar(self, name, value, step):
                written[name, step] = value

            def add_text(self, name, text, step):
                written[name, step] = text

            def flush(self):
                written["flushed"] = True

            def close(self):
                written["closed"] = True

    monkeypatch.setattr(tensorboard, "import_module", lambda _: Module)
    sink = tensorboard.TensorBoard(tmp_path)
    sink.emit(BAD)
    sink.close()
    assert {name: value for (name, step), value in _pairs(written) if name != "zerodrift/why"} == metrics_of(
        BAD
    )
    assert "above-gate" in written["zerodrift/why", 1]
    assert written["directory"] == str(tmp_path)
    assert written["flushed"]
    assert written["closed"]


def _pairs(written):
    return [(key, value) for key, value in written.items() if isinstance(key, tuple)]


def test_a_sink_that_fails_is_counted_and_harms_no_other(tmp_path, caplog):
    class Broken:
        def emit(self, decision):
            raise OSError("https://hooks.example/SECRET")

        def close(self):
            raise RuntimeError("SECRET")

    path = tmp_path / "z.jsonl"
    sinks = Sinks([Broken(), Jsonl(path)])
    with caplog.at_level(logging.WARNING):
        sinks.emit(GOOD)
        sinks.emit(BAD)
        sinks.close()
    assert sinks.failures == 3
    assert len(lines(path)) == 2
    assert len(caplog.records) == 3
    assert "SECRET" not in caplog.text
