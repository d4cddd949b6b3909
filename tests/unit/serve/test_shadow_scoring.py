"""Samples that passed, held against the trainer's model: what is scored, by which weights, and what is left out by which name."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from loopback import event, serving
from serving import MODEL
from shadowing import shadowing

from zerodrift import models
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import ModelError, ZerodriftError
from zerodrift.models.directory import WEIGHTS
from zerodrift.serve.shadow.figures import Mismatch
from zerodrift.serve.shadow.reference import ShadowReference
from zerodrift.serve.shadow.samples import Passed, Unscored, UpstreamFacts, samples_of
from zerodrift.serve.shadow.scorer import MODELS, ShadowScorer, Switch

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
PROMPT, TOKENS = [5, 6, 7], [8, 9]
RAW = UpstreamFacts(LogprobKind.RAW, frozenset({"adapter"}))
PROCESSED = RAW._replace(kind=LogprobKind.PROCESSED)
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}


def completion(scores, **more):
    told = {"tokens": [f"token_id:{each}" for each in TOKENS], "token_logprobs": scores, "top_logprobs": []}
    return {
        "index": 0,
        "finish_reason": "length",
        "token_ids": TOKENS,
        "prompt_token_ids": PROMPT,
        "logprobs": told,
    } | more


def chat(logprobs):
    told = {"content": [{"token": "a", "logprob": each} for each in logprobs]}
    return {
        "prompt_token_ids": PROMPT,
        "choices": [{"index": 0, "finish_reason": "stop", "token_ids": TOKENS, "logprobs": told}],
    }


def generated(logprobs, **more):
    told = {
        "content": [
            {"token_id": token, "logprob": each} for token, each in zip(TOKENS, logprobs, strict=True)
        ]
    }
    choice = {"index": 0, "finish_reason": "length", "token_ids": TOKENS, "logprobs": told} | more
    return {"prompt_token_ids": PROMPT, "choices": [choice]}


def streamed(logprobs):
    """Two deltas and the end, as vLLM writes them."""
    deltas = [
        {
            "index": 0,
            "token_ids": [token],
            "finish_reason": reason,
            "prompt_token_ids": prompt,
            "logprobs": {"tokens": [f"token_id:{token}"], "token_logprobs": [each], "top_logprobs": [None]},
        }
        for token, each, reason, prompt in zip(
            TOKENS, logprobs, (None, "length"), (PROMPT, None), strict=True
        )
    ]
    return b"".join(event({"choices": [delta]}) for delta in deltas) + event("[DONE]")


def passed(path, answer, asked=None):
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return Passed(path, json.dumps(asked or {}).encode(), content, isinstance(answer, bytes))


GOOD = {"choices": [completion([-1.0, -2.0])]}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (COMPLETIONS, GOOD),
        (COMPLETIONS, streamed([-1.0, -2.0])),
        (CHAT, chat([-1.0, -2.0])),
        (GENERATE, generated([-1.0, -2.0])),
    ],
    ids=["whole", "streamed", "chat", "generate"],
)
def test_every_route_gives_the_same_sample(path, answer):
    [sample] = samples_of(passed(path, answer), RAW)
    assert sample == (PROMPT, TOKENS, [-1.0, -2.0])


@pytest.mark.parametrize(
    ("path", "answer", "asked", "facts", "reason"),
    [
        (COMPLETIONS, {"choices": [completion([-1.0, -2.0], token_ids=None)]}, {}, RAW, "no-ids"),
        (COMPLETIONS, {"choices": [completion([-1.0, -2.0], logprobs=None)]}, {}, RAW, "no-logprobs"),
        (COMPLETIONS, {"choices": [completion([-1.0])]}, {}, RAW, "no-logprobs"),
        (COMPLETIONS, {"choices": [completion([-1.0, None])]}, {}, RAW, "no-logprobs"),
        (COMPLETIONS, {"choices": 5}, {}, RAW, "unreadable"),
        (COMPLETIONS, b"data: {}\n\n", {}, RAW, "unreadable"),
        (COMPLETIONS, b"data: {", {}, RAW, "unreadable"),
        (CHAT, b"data: [DONE]\n\n", {}, RAW, "chat-stream"),
        (CHAT, chat([-1.0, -2.0]), {"messages": [{"content": [{"type": "image_url"}]}]}, RAW, "multimodal"),
        (COMPLETIONS, GOOD, {"model": "adapter"}, RAW, "adapter"),
        (COMPLETIONS, GOOD, {"temperature": 0.5}, PROCESSED, "processed"),
        (COMPLETIONS, GOOD, {}, PROCESSED, "processed"),
        (COMPLETIONS, GOOD, NEUTRAL | {"min_tokens": 1}, PROCESSED, "processed"),
        (COMPLETIONS, GOOD, {}, RAW._replace(kind=None), "kind-unknown"),
        # vLLM masks by a grammar before it takes raw logprobs.
        (COMPLETIONS, GOOD, {"response_format": {"type": "json_object"}}, RAW, "structured"),
        (COMPLETIONS, GOOD, {"structured_outputs": {"choice": ["a"]}}, RAW, "structured"),
        (CHAT, chat([-1.0, -2.0]), {"tool_choice": "required"}, RAW, "structured"),
        (
            GENERATE,
            generated([-1.0, -2.0]),
            {"sampling_params": {"structured_outputs": {"regex": "a"}}},
            RAW,
            "structured",
        ),
        # A field of another route, which the engine does not read here.
        (CHAT, chat([-1.0, -2.0]), {"temperature": 0.2, "sampling_params": NEUTRAL}, PROCESSED, "processed"),
        (
            GENERATE,
            generated(
                [-1.0, -2.0], weight_versions=[{"version": v, "start": v, "end": v + 1} for v in (0, 1)]
            ),
            {},
            RAW,
            "unreadable",
        ),
        (
            GENERATE,
            generated(
                [-1.0, -2.0], weight_versions=[{"version": str(v), "start": v, "end": v + 1} for v in (0, 1)]
            ),
            {},
            RAW,
            "mixed",
        ),
    ],
)
def test_what_cannot_be_scored_says_why(path, answer, asked, facts, reason):
    with pytest.raises(Unscored) as why:
        samples_of(passed(path, answer, asked), facts)
    assert str(why.value) == reason


def test_processed_numbers_that_are_raw_as_well_are_scored():
    assert samples_of(passed(COMPLETIONS, GOOD, NEUTRAL), PROCESSED)
    assert samples_of(passed(COMPLETIONS, GOOD, {"top_p": 1.0}), PROCESSED._replace(fills_in=False))
    assert samples_of(passed(GENERATE, generated([-1.0, -2.0]), {"sampling_params": NEUTRAL}), PROCESSED)
    assert samples_of(passed(COMPLETIONS, GOOD, {"temperature": 0.5, "top_p": 0.9}), RAW)


class Held:
    """A reference whose weights are one number, which is the logprob of every token."""

    def __init__(self):
        self.value = -1.0

    def read(self, path):
        return {"value": float(path)}

    def switch(self, weights):
        self.value = weights["value"]

    def score(self, prompt, tokens):
        if self.value > 0:
            raise ModelError("no such logprob")
        return [self.value] * len(tokens)


@pytest.fixture
def scorer():
    found = ShadowScorer(Held(), 3, lambda: RAW, Mismatch())
    yield found
    found.close()


def offer(scorer, path, answer, version=0):
    """The next one that is chosen."""
    chosen = next(filter(None, (scorer.choose(path, b"{}") for _ in range(1000))))
    chosen.add(json.dumps(answer).encode())
    scorer.offer(chosen, version, streamed=False)
    chosen.forget()


def settled(scorer):
    """All that waits has been looked at."""
    deadline = time.monotonic() + 10
    while scorer._queue.qsize() or scorer._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert scorer._room._taken == 0
    return scorer._mismatch


def test_one_answer_in_so_many_is_chosen(scorer):
    chosen = [scorer.choose(COMPLETIONS, b"{}") is not None for _ in range(7)]
    assert chosen == [False, False, True, False, False, True, False]


def test_samples_are_held_against_the_weights_that_made_them(scorer):
    offer(scorer, COMPLETIONS, GOOD)
    scorer.switch(Switch(1, {"value": -2.0}))
    offer(scorer, COMPLETIONS, GOOD, version=1)
    offer(scorer, COMPLETIONS, GOOD, version=0)  # its answer came late
    seen = settled(scorer)
    assert (seen.samples, seen.tokens, seen.absolute) == (2, 4, 2.0)
    assert seen.unscored == {"weights": 1}


def test_weights_that_nobody_read_score_nothing_until_some_are(scorer):
    scorer.switch(Switch(1, None))
    offer(scorer, COMPLETIONS, GOOD, version=1)
    scorer.switch(Switch(2, None, keeps=True))
    offer(scorer, COMPLETIONS, GOOD, version=2)
    scorer.switch(Switch(3, {"value": -1.0}))
    scorer.switch(Switch(4, None, keeps=True))
    offer(scorer, COMPLETIONS, GOOD, version=4)
    seen = settled(scorer)
    assert (seen.samples, seen.unscored) == (1, {"weights": 2})


def test_of_models_that_wait_for_their_turn_the_newest_are_kept(scorer, monkeypatch):
    """Each is a whole model, and updates may come faster than samples are scored."""
    scoring, go_on = threading.Event(), threading.Event()

    def score(prompt, tokens):
        scoring.set()
        assert go_on.wait(10)
        return [-1.0] * len(tokens)

    monkeypatch.setattr(scorer.reference, "score", score)
    offer(scorer, COMPLETIONS, GOOD)
    assert scoring.wait(10)
    for version in range(1, 6):
        scorer.switch(Switch(version, {"value": -1.0}))
        offer(scorer, COMPLETIONS, GOOD, version=version)
        assert len(scorer._weights) <= MODELS
    go_on.set()
    seen = settled(scorer)
    assert (seen.samples, seen.unscored) == (1 + MODELS, {"weights": 5 - MODELS})


def test_one_token_that_is_very_far_off_does_not_end_the_sum():
    seen = Mismatch()
    seen.add([-9999.0], [-1.0])
    before = seen.k3
    for _ in range(100):
        seen.add([-1.1], [-1.0])
    assert seen.k3 > before


def test_a_reference_that_fails_is_not_the_end(scorer):
    scorer.switch(Switch(1, {"value": 5.0}))
    offer(scorer, COMPLETIONS, GOOD, version=1)
    settled(scorer)
    scorer.switch(Switch(2, {"wrong": 5.0}))
    offer(scorer, COMPLETIONS, GOOD, version=2)
    offer(scorer, COMPLETIONS, {"choices": [{"index": {}}]}, version=2)
    scorer.switch(Switch(3, {"value": -1.0}))
    offer(scorer, COMPLETIONS, GOOD, version=3)
    seen = settled(scorer)
    assert (seen.samples, seen.unscored) == (1, {"refused": 1, "weights": 2})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A, B whose layer 1 is another, and what is no whole checkpoint of the model."""
    root = tmp_path_factory.mktemp("root").resolve()
    a = load_file(models.materialise(MODEL, root / "A") / WEIGHTS)
    down = "model.layers.1.mlp.down_proj.weight"
    for name, tensors in {
        "B": a | {down: a[down] * 2},
        "lost": {key: tensor for key, tensor in a.items() if key != down},
        "cut": a | {down: a[down][:-1].contiguous()},
    }.items():
        (root / name).mkdir()
        save_file(tensors, root / name / WEIGHTS)
    return root


@pytest.mark.parametrize("path", ["lost", "cut", "nowhere", "../A", "/etc"])
def test_what_is_no_checkpoint_below_the_root_is_not_taken(checkpoints, path):
    reference = ShadowReference(MODEL, "float32", checkpoints)
    before = reference.score(PROMPT, TOKENS)
    with pytest.raises(ZerodriftError):
        reference.read(path)
    assert reference.score(PROMPT, TOKENS) == before


def test_the_reference_follows_an_update_and_the_engine_that_does_not_is_seen(checkpoints):
    """A whole way: an engine of two sets of numbers, updates by vLLM's calls, and what /metrics says of it."""
    by = {
        name: ShadowReference(checkpoints / name if name == "A" else MODEL, "float32", checkpoints)
        for name in "AB"
    }
    by["B"].switch(by["B"].read("B"))
    says = {name: each.score(PROMPT, TOKENS) for name, each in by.items()}
    assert says["A"] != says["B"]
    has = ["A"]

    def unscored(proxy, name):
        page = proxy.get("/metrics").content.decode()
        return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)

    def wait(proxy, name, value):
        deadline = time.monotonic() + 20
        while unscored(proxy, name) < value:
            assert time.monotonic() < deadline, proxy.get("/metrics").content.decode()
            time.sleep(0.02)

    with serving() as engine:
        done = lambda *_: (200, {})  # noqa: E731
        engine.routes |= {
            f"POST {path}": done
            for path in ("/start_weight_update", "/update_weights", "/finish_weight_update")
        }
        engine.routes["GET /v1/models"] = lambda *_: (200, {"data": [{"id": "m", "parent": None}]})
        engine.routes["GET /server_info?config_format=json"] = lambda *_: (
            200,
            {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
        )
        engine.routes[f"POST {COMPLETIONS}"] = lambda _, http: http.send(
            200, {"choices": [completion(says[has[0]])]}, content_type="application/json"
        )

        def push(proxy, path):
            proxy.admin("/start_weight_update")
            proxy.admin("/update_weights", {"update_info": {"directory": path}})
            proxy.admin("/finish_weight_update", {"weight_version": path})

        with shadowing(engine.url, rescore_every=1, weight_root=checkpoints) as proxy:
            proxy.post(COMPLETIONS, {})
            wait(proxy, "zerodrift_shadow_scored_samples_total", 1)
            assert unscored(proxy, "zerodrift_shadow_mismatch_largest_nats") < 1e-5
            push(proxy, str(checkpoints / "B"))
            has[0] = "B"
            proxy.post(COMPLETIONS, {})
            wait(proxy, "zerodrift_shadow_scored_samples_total", 2)
            assert unscored(proxy, "zerodrift_shadow_mismatch_largest_nats") < 1e-5
            has[0] = "A"  # as if the update had been lost
            proxy.post(COMPLETIONS, {})
            wait(proxy, "zerodrift_shadow_scored_samples_total", 3)
            largest = unscored(proxy, "zerodrift_shadow_mismatch_largest_nats")
            expected = max(abs(a - b) for a, b in zip(says["A"], says["B"], strict=True))
            assert largest == pytest.approx(expected, abs=1e-5)
            push(proxy, "/somewhere/else")
            proxy.post(COMPLETIONS, {})
            wait(proxy, 'zerodrift_shadow_unscored_total{reason="weights"}', 1)
            assert unscored(proxy, "zerodrift_shadow_scored_samples_total") == 3
            assert unscored(proxy, 'zerodrift_shadow_updates_total{result="unread"}') == 1
