"""Two trainers that do not know of each other, each calling what it likes: one version is served at a time, and every token is of the one it names."""

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from hour_checking import Checker, Published
from hour_traffic import MODEL, Client, Told, logprobs_of, spans_of
from serve_hour import save_checkpoints, settled
from serving_process import TOKEN, served

SECONDS = 8
OPTIONS = ("--max-model-len", "256", "--max-num-seqs", "8")
PUBLISH = ("/update_weights", "/finish_weight_update", "/update_weight_version")


class Crowd:
    """Trainers and clients of one server, until they are told to end."""

    def __init__(self, url, root, checkpoints):
        self.url, self.root, self.checkpoints = url, root, checkpoints
        self.checker, self.over, self.mutex = Checker(checkpoints), threading.Event(), threading.Lock()
        self.statuses, self.told, self.wrong = Counter(), [], []
        _, told, _ = Client(url, TOKEN).ask("/weight_info", method="GET")
        self.publish(told["weight_version"], told["digest"])

    def publish(self, label, digest):
        with self.mutex:
            self.checker.publish(Published(label, digest, "recompute"))

    def calls(self, draw, name):
        """One of each, contradictory ones too; what the other trainer opened is finished, and what it paused goes on."""
        directory = str(draw.choice([*self.checkpoints, self.root / "spoilt", self.root / "nowhere"]))
        adapter = draw.choice("ab")
        return [
            ("/pause?mode=keep", None), ("/pause?mode=abort", None), ("/pause?mode=wait", None),
            ("/resume", None), ("/resume", None), ("/sleep?level=1", None), ("/wake_up", None),
            ("/init_weight_transfer_engine", {"init_info": {}}), ("/shutdown_weight_transfer_engine", None),
            ("/start_weight_update", {}), ("/start_weight_update", {"expect": "initial"}),
            ("/update_weights", {"update_info": {"directory": directory}}),
            ("/finish_weight_update", {}), ("/finish_weight_update", {"weight_version": name}),
            ("/update_weights", {"weight_dir": directory}), ("/update_weights", {"weight_dir": directory}),
            ("/update_weight_version", {"new_version": name}), ("/abort_requests", {}),
            ("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": "adapter"}),
            ("/v1/unload_lora_adapter", {"lora_name": adapter}),
            ("/reset_prefix_cache", None), ("/weight_checker", {"action": "checksum"}),
        ]  # fmt: skip

    def train(self, seed):
        draw, client = random.Random(seed), Client(self.url, TOKEN)
        for number in range(10**6):
            if self.over.is_set():
                return
            path, body = draw.choice(self.calls(draw, f"of {seed}: {number}"))
            status, answer, _ = client.ask(path, body)
            self.statuses[path.partition("?")[0], status] += 1
            if status == 200 and path in PUBLISH and "digest" in answer:
                self.publish(answer.get("weight_version") or answer["new_version"], answer["digest"])
            time.sleep(0.1 * draw.random())

    def ask(self, seed):
        draw, client = random.Random(seed), Client(self.url)
        while not self.over.is_set():
            sampling = {
                "seed": draw.randrange(2**31),
                "max_tokens": draw.randrange(1, 60),
                "ignore_eos": True,
            }
            prompt = [draw.randrange(4, 500) for _ in range(draw.randrange(1, 30))]
            body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **sampling}
            status, answer, _ = client.ask("/v1/completions", body)
            self.statuses["/v1/completions", status] += 1
            [choice] = answer["choices"]
            if choice["token_ids"]:
                told = Told(
                    "sample", prompt, choice["token_ids"], logprobs_of(choice), spans_of(choice), sampling
                )
                self.told.append(told)

    def guarded(self, function, seed):
        try:
            function(seed)
        except BaseException as error:  # the test ends with all that went wrong
            self.wrong.append(repr(error))

    def run(self):
        jobs = [(self.train, 1), (self.train, 2), *((self.ask, seed) for seed in range(3, 7))]
        threads = [threading.Thread(target=self.guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        self.over.wait(SECONDS)
        self.over.set()
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            Client(self.url, TOKEN).ask("/wake_up")
            time.sleep(0.2)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"


def test_two_trainers(tmp_path):
    checkpoints = save_checkpoints(tmp_path)
    with served(tmp_path, *OPTIONS, model=MODEL, log=tmp_path / "server.log") as server:
        crowd = Crowd(server.url, tmp_path, checkpoints)
        crowd.run()
        figures = settled(Client(server.url, TOKEN))
    assert crowd.wrong == []
    assert {status for _, status in crowd.statuses} <= {200, 400, 404, 409, 422, 429}
    assert {status for path, status in crowd.statuses if path == "/v1/completions"} == {200}
    for told in crowd.told:
        crowd.checker.check(told)
    assert crowd.checker.tokens > 100
    assert sum(path in PUBLISH and status == 200 for path, status in crowd.statuses) >= 1
    assert figures["zerodrift_requests_in_flight"] == figures["zerodrift_engine_blocks_held"] == 0
