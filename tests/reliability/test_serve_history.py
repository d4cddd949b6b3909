"""A server over HTTP, asked, left, paused, aborted and updated by chance: its history breaks no promise of `weights/history.py`."""

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parent))

from hour_checking import Checker, Published
from hour_traffic import MODEL, MOST_WAITING, Client, Told, logprobs_of, spans_of
from serve_hour import save_checkpoints, settled
from serving_process import TOKEN, served

from zerodrift import models
from zerodrift.core.version import WeightVersion
from zerodrift.engine.engine import Engine
from zerodrift.engine.replay import replay
from zerodrift.weights import history
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.listing import manifest_of

SECRET_TEXT = "the keeper's own words"
OPTIONS = ("--max-model-len", "256", "--max-num-seqs", "8", "--max-waiting", str(MOST_WAITING))
STEPS = 40
MOST_FILES = 24
"""More than at the start: sockets of clients that are there."""


class Witness:
    """Writes down what clients and the trainer see, in the order in which they see it."""

    def __init__(self, url: str, checkpoints: list[Path], seed: int) -> None:
        self.client, self.trainer = Client(url), Client(url, TOKEN)
        self.checkpoints, self.draw = checkpoints, random.Random(seed)
        self.events: list[history.AnyEvent] = [
            history.Private(what="the admin token", text=TOKEN),
            history.Private(what="the text of a prompt", text=SECRET_TEXT),
        ]
        self.told: dict[str, Told] = {}
        self.left: list[str] = []
        self.checker, self.solo = Checker(checkpoints), Engine(MODEL)
        self.sums = {}
        for digest, path in zip(self.checker.digests, checkpoints, strict=True):
            records = manifest_of(checkpoint_state(models.load(str(path)))).tensors
            self.sums[digest] = {record.name: record.xxh3_128 for record in records}
        self.version = self.first()
        self.paused = self.kv = None
        self.threads: list[threading.Thread] = []
        self.waiting: set[str] = set()
        self.mutex = threading.Lock()
        self.counts: Counter[str] = Counter()

    def control(self, path, body=None, *, method="POST"):
        status, answer, _ = self.trainer.ask(path, body, method=method)
        return status, answer

    def first(self):
        _, told = self.control("/weight_info", method="GET")
        version = WeightVersion(told["weight_version"], told["digest"])
        self.events += [
            history.Committed(version=version),
            history.Published(version=version, follows=None, kv=None),
        ]
        self.checker.publish(Published(version.label, version.digest, "recompute"))
        assert self.control("/init_weight_transfer_engine", {"init_info": {}})[0] == 200
        return version

    # --- what clients do -------------------------------------------------------------------------------------------

    def ask(self):
        name = f"r{len(self.threads)}"
        self.events.append(history.Accepted(request=name))
        thread = threading.Thread(
            target=self.asked, args=(name, random.Random(self.draw.random())), daemon=True
        )
        with self.mutex:
            self.waiting.add(name)
        self.threads.append(thread)
        thread.start()

    def asked(self, name, draw):
        sampling = {"seed": draw.randrange(2**31), "max_tokens": draw.randrange(4, 40), "ignore_eos": True}
        prompt = [draw.randrange(4, 500) for _ in range(draw.randrange(1, 20))]
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "request_id": name, **sampling}
        kind = draw.choice(["whole", "stream", "left", "text"])
        if kind == "text":
            body["prompt"] = SECRET_TEXT + name
        if kind in ("whole", "text"):
            status, answer, _ = self.client.ask("/v1/completions", body)
            self.end(name, status, [answer["choices"][0]] if status == 200 else [], sampling)
            return
        connection, answer = self.client.open("/v1/completions", {**body, "stream": True})
        most, events = (draw.randrange(0, 6), 0) if kind == "left" else (10**6, 0)
        choices = []
        while events < most and (line := answer.readline()):
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                choices += event.get("choices", [])
                events += 1
        answer.close()
        connection.close()
        if choices and choices[-1]["finish_reason"]:
            self.end(name, answer.status, choices, sampling)
        elif kind == "left":
            with self.mutex:
                self.left.append(name)
                self.waiting.discard(name)

    def end(self, name, status, choices, sampling):
        how = "error"
        if status == 200:
            last = choices[-1]
            how = "aborted" if last["finish_reason"] == "abort" else "complete"
            tokens = [token for each in choices for token in each["token_ids"]]
            logprobs = [value for each in choices for value in logprobs_of(each)]
            prompt = choices[0]["prompt_token_ids"]
            self.told[name] = Told("sample", prompt, tokens, logprobs, spans_of(last), sampling)
        with self.mutex:
            self.waiting.discard(name)
            self.counts[how] += 1
            self.events.append(history.Finished(request=name, how=how))

    # --- what the trainer does -------------------------------------------------------------------------------------

    def abort(self):
        with self.mutex:
            named = [*self.waiting]
        if named:
            self.control("/abort_requests", {"request_ids": [self.draw.choice(named)]})

    def pause(self):
        mode = self.draw.choice(["mode=keep&clear_cache=false", "mode=keep", "mode=wait", "mode=abort"])
        if self.paused and "wait" in mode:
            return
        assert self.control(f"/pause?{mode}")[0] == 200
        self.paused, self.kv = mode, "keep" if "false" in mode else "recompute"

    def resume(self):
        assert self.control("/resume")[0] == 200
        self.paused = self.kv = None

    def update(self):
        directory, kv = str(self.draw.choice(self.checkpoints)), self.kv or "recompute"
        with self.mutex:
            in_flight = tuple(self.waiting)
        status, told = self.control(
            "/update_weights", {"weight_dir": directory, "expect": self.version.label}
        )
        assert status == 200, told
        version = WeightVersion(told["weight_version"], told["digest"])
        self.events += [
            history.Committed(version=version),
            history.Published(version=version, follows=self.version.label, kv=kv, in_flight=in_flight),
        ]
        self.checker.publish(Published(version.label, version.digest, kv))
        self.version = version

    def refused(self):
        body = self.draw.choice(
            [{"weight_dir": "spoilt"}, {"weight_dir": "step-1", "expect": "nobody"}, {"weight_dir": "/etc"}]
        )
        status, answer = self.control("/update_weights", body)
        assert status in (409, 422), answer
        self.events.append(history.Refused(code=answer["error"]["code"]))

    def look(self):
        """At the tensors that run, and whose they are."""
        _, told = self.control("/weight_info", method="GET")
        _, sums = self.control("/weight_checker", {"action": "checksum"})
        version = WeightVersion(told["weight_version"], told["digest"])
        same = sums["checksums"] == self.sums[version.digest]
        self.events.append(history.Stepped(version=version, digest=version.digest if same else "a mixture"))

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self, process, files, log):
        self.resume()
        for thread in self.threads:
            thread.join(120)
        figures = settled(self.trainer)
        flying = int(figures["zerodrift_requests_in_flight"])
        if not flying:
            self.events += [history.Finished(request=name, how="aborted") for name in self.left]
        self.events += [
            history.Sized(what="requests that nobody waits for", value=flying, cap=0),
            history.Sized(what="open files", value=open_files(process), cap=files + MOST_FILES),
        ]
        for name, told in self.told.items():
            if told.tokens:
                self.computed_again(name, told)
        self.events.append(history.Logged(text=log.read_text()))

    def computed_again(self, name, told):
        output = self.checker.as_output(told)
        bits = [(token, value.hex()) for token, value in zip(told.tokens, told.logprobs, strict=True)]
        self.events.append(
            history.Ended(
                request=name,
                bits=tuple(bits),
                prompt_length=len(told.prompt),
                versions=output.versions,
                lineage=output.lineage,
            )
        )
        again = replay(self.checker.engine, output, self.checker.weights_of)
        bits = tuple((token, value.hex()) for token, value in zip(*again, strict=True))
        self.events.append(history.Recomputed(request=name, bits=bits))
        if len(told.spans) == 1 and len(told.tokens) == told.sampling["max_tokens"]:
            self.solo.swap_weights(self.checker.weights_of(output.versions[0].version))
            [alone] = self.solo.generate([told.prompt], output.sampling)
            bits = tuple(
                (token, value.hex()) for token, value in zip(alone.token_ids, alone.logprobs, strict=True)
            )
            self.events.append(history.Alone(request=name, bits=bits))


def open_files(process):
    return sum(1 for _ in Path(f"/proc/{process.pid}/fd").iterdir())


def driven(root: Path, seed: int, steps: int) -> Witness:
    checkpoints, log = save_checkpoints(root), root / "server.log"
    with served(root, *OPTIONS, model=MODEL, log=log) as server:
        witness = Witness(server.url, checkpoints, seed)
        files = open_files(server.process)
        acts = [witness.ask] * 8 + [witness.abort, witness.pause, witness.resume, witness.resume]
        acts += [witness.update, witness.update, witness.refused, witness.look]
        for _ in range(steps):
            witness.draw.choice(acts)()
            time.sleep(witness.draw.random() * 0.05)
        witness.close(server.process, files, log)
    return witness


@pytest.fixture(scope="module")
def witness(tmp_path_factory):
    return driven(tmp_path_factory.mktemp("root"), 1, STEPS)


def test_it_breaks_no_promise(witness):
    assert history.violations(witness.events) == []
    kinds = Counter(type(event).__name__ for event in witness.events)
    for kind in ("Published", "Refused", "Stepped", "Ended", "Recomputed", "Alone", "Accepted", "Finished"):
        assert kinds[kind] > 0, kinds
    assert witness.left, "nobody left"


def test_what_it_would_have_seen(witness):
    """The controls: a request whose end nobody told, a token in the log, one bit of one number."""
    events = witness.events
    place = next(at for at, event in enumerate(events) if isinstance(event, history.Finished))
    silent = history.violations([*events[:place], *events[place + 1 :]])
    assert [each.invariant for each in silent] == ["I5"]
    told = history.violations([*events, history.Logged(text=f"401 for Bearer {TOKEN}")])
    assert [each.invariant for each in told] == ["I9"]
    place = next(at for at, event in enumerate(events) if isinstance(event, history.Recomputed))
    (token, value), *rest = events[place].bits
    wrong = msgspec.structs.replace(events[place], bits=((token, (float.fromhex(value) - 1e-6).hex()), *rest))
    changed = history.violations([*events[:place], wrong, *events[place + 1 :]])
    assert [each.invariant for each in changed] == ["I1"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
def test_other_orders_break_none_either(tmp_path, seed):
    assert history.violations(driven(tmp_path, seed, 300).events) == []
