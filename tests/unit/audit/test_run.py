"""The ladder on engines that fail at one rung: what could not be judged is said, and never passed."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.audit.decide import Circumstances, decide
from zerodrift.audit.probe_suite import ProbeSuite, guarded
from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.audit.record import named_alike
from zerodrift.audit.run import Audit, Audited, _with_aside
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion, EngineFingerprint
from zerodrift.core.errors import (
    BadAnswer,
    CapabilityMissing,
    EngineRefused,
    EngineUnreachable,
    InvalidPrompt,
    RecordError,
)
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.records.codec import read_lines
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome, Probe, ProbeRecord
from zerodrift.weights.digest import model_digest

PROMPTS = [Prompt((0, 10 + number)) for number in range(4)]
TOKENS = 4


@pytest.fixture
def audit(llama, tmp_path):
    def build(engine, **options):
        values = {
            "engine": engine,
            "reference": llama,
            "prompts": PROMPTS,
            "sampling": SamplingParams(temperature=0.7, max_tokens=TOKENS),
            "validation": ValidationConfig(num_prompts=4, equivalence_trials=4, max_tokens=TOKENS),
            "precision": Precision.FP32,
            "directory": tmp_path,
            **options,
        }
        return Audit(**values)

    return build


@pytest.fixture
def honest(llama):
    return lambda request: llama.generate([request])[0].completions[0]


def able_to_do_nothing(llama: ReferenceBackend) -> ReferenceBackend:
    """A sound engine that offers nothing beyond generating: the rungs that need more cost nothing."""
    engine = copy.copy(llama)
    engine.capabilities = frozenset()
    return engine


def probe(audited: Audited, name: str) -> ProbeRecord:
    (record,) = [record for record in audited.record.probes if record.name == name]
    return record


def test_an_engine_that_never_answers(audit, scripted):
    def answer(request, number):
        raise EngineUnreachable("nothing answers at http://nowhere")

    audited = audit(scripted(answer)).run()
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert "nothing answers at http://nowhere" in audited.record.message
    assert probe(audited, "contract").required
    assert probe(audited, "parity").message == "nothing to compare"
    assert audited.table is None
    assert audited.measurements == ()
    assert audited.record.floor == audited.record.metrics == audited.record.gates == {}


def test_an_engine_that_answers_nothing(audit, scripted):
    audited = audit(scripted(lambda request, number: Answer(()))).run()
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert probe(audited, "contract").evidence == {"completions": 0, "unreadable": 4, "ended": 0}
    assert "did not come back" in probe(audited, "contract").message


def test_an_engine_that_says_no_word(audit, scripted, completion):
    """Empty outputs have nothing to compare, and are found out by how they claim to have ended."""
    empty = scripted(lambda request, number: Answer((completion(request.prompt.token_ids, ()),)))
    audited = audit(empty).run()
    assert audited.record.verdict is Outcome.FAIL
    assert audited.record.causes[0].cause == "unexplained"
    assert "another length" in audited.record.causes[0].evidence


def test_an_engine_without_a_fingerprint_is_still_judged(audit, scripted):
    class Dead:
        def __call__(self):
            raise EngineUnreachable("gone")

    engine = scripted(lambda request, number: Answer(()))
    engine.fingerprint = Dead()
    audited = audit(engine).run()
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert audited.record.engine.engine == "scripted"


@pytest.mark.parametrize(
    ("where", "verdict", "causes"),
    [
        ("prompt_token_ids", Outcome.INCONCLUSIVE, []),
        # What is sampled comes from the engine's own vocabulary.
        ("token_ids", Outcome.FAIL, ["weights/other-model"]),
    ],
)
def test_ids_that_the_model_does_not_have(audit, scripted, honest, where, verdict, causes):
    def answer(request, number):
        sound = honest(request)
        ids = getattr(sound, where)
        return Answer((msgspec.structs.replace(sound, **{where: (*ids[:-1], 5000)}),))

    engine = scripted(answer, capabilities=frozenset())
    audited = audit(engine).run()
    assert audited.record.verdict is verdict
    assert [cause.cause for cause in audited.record.causes] == causes
    contract = probe(audited, "contract")
    assert contract.evidence == {"completions": 0, "unreadable": 4, "ended": 0}
    assert "5000" in contract.message
    assert "512 tokens" in contract.message


def test_an_engine_that_does_not_know_the_models_last_tokens(audit, scripted, honest):
    def answer(request, number):
        if max(request.prompt.token_ids) >= 12:
            raise EngineRefused("400: Token id 13 is out of vocabulary")
        return Answer((honest(request),))

    audited = audit(scripted(answer, capabilities=frozenset())).run()
    assert audited.record.verdict is Outcome.FAIL
    assert [cause.cause for cause in audited.record.causes] == ["weights/other-model"]
    assert "out of vocabulary" in probe(audited, "contract").message


def test_an_engine_that_is_started_anew_with_other_settings_is_not_judged(audit, scripted, honest):
    engine = scripted(lambda request, number: Answer((honest(request),)), capabilities=frozenset())
    facts = [
        EngineFingerprint(engine="reference", semantic={}, numeric={"dtype": dtype}, deployment={})
        for dtype in ("float32", "bfloat16")
    ]
    engine.fingerprint = lambda: facts.pop(0)
    audited = audit(engine).run()
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert "started anew" in probe(audited, "settings").message
    assert probe(audited, "settings").required


def test_few_tokens_are_inconclusive_and_every_question_is_listed(audit, llama, tmp_path):
    steps: list[tuple[str, int, int]] = []

    class Listening:
        name = ""

        def stage(self, name):
            self.name = name

        def step(self, done, total):
            steps.append((self.name, done, total))

    audited = audit(able_to_do_nothing(llama), progress=Listening()).run()
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert [record.name for record in audited.record.probes] == [
        "contract",
        "tokenizer",
        "template",
        "parity",
        "sampling",
        "repeat",
        "batch",
        "cache",
        "stream",
        "prefill-decode",
        "self-consistency",
        "given-tokens",
        "return",
    ]
    assert probe(audited, "contract").status is Outcome.PASS
    assert probe(audited, "parity").vacuous
    assert audited.record.floor["variants"] == 8
    assert audited.table is not None
    assert len(audited.table.token) == sum(len(m.contracted) for m in audited.measurements)
    assert {name for name, *_ in steps} == {"sample", "score", "self-consistency"}
    assert all(0 < done <= total for _, done, total in steps)
    assert len(list(read_lines(tmp_path / "rollouts.jsonl", Rollout))) == 4


def test_an_engine_of_another_plan_is_refused(audit, scripted, completion):
    """A directory that holds other rollouts is the user's mistake, not the engine's."""
    engine = scripted(lambda request, number: Answer((completion(request.prompt.token_ids, ()),)))
    audit(engine).run()
    with pytest.raises(RecordError, match="another plan"):
        audit(engine, sampling=SamplingParams(temperature=0.9, max_tokens=TOKENS)).run()


# --- rewards ----------------------------------------------------------------------------------------------------


class Vowels:
    """Rewards what an engine says it wrote; nothing but its `text` is looked at."""

    name = "vowels"

    def __init__(self, reward: Callable[[str], Any] | None = None) -> None:
        self.told = reward or (lambda text: sum(letter in "aeiou" for letter in text))

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        raise NotImplementedError("an audit is handed its prompts")

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        return self.told(completion.text or "")


@pytest.fixture
def rewarding(audit):
    def build(engine, task, **options):
        enough = ValidationConfig(num_prompts=4, equivalence_trials=60, max_tokens=TOKENS)
        return audit(engine, task=task, validation=enough, **options)

    return build


def test_rewards_of_a_sound_engine_are_the_references(rewarding, llama, tmp_path):
    audited = rewarding(able_to_do_nothing(llama), Vowels()).run()
    record = probe(audited, "rewards")
    assert (record.status, record.required) == (Outcome.PASS, True)
    assert record.evidence["engine_rewards"] == record.evidence["reference_rewards"] == 60
    ours, theirs = (
        list(read_lines(tmp_path / name, Rollout)) for name in ("rollouts.jsonl", "reference.jsonl")
    )
    assert {rollout.source for rollout in theirs} == {"reference"}
    assert [r.request.prompt for r in theirs] == [r.request.prompt for r in ours]
    # Had they shared seeds, this engine would have given the reference's own tokens.
    assert [r.completion for r in theirs] != [r.completion for r in ours]


def test_text_that_is_not_what_its_tokens_say_fails_by_rewards_alone(rewarding, llama):
    """Every number is right, and a trainer would still be taught by other rewards: a fault without a name."""

    class Mumbling(ReferenceBackend):
        def generate(self, requests):
            return [
                Answer(tuple(msgspec.structs.replace(c, text="hmm") for c in answer.completions))
                for answer in super().generate(requests)
            ]

    engine = able_to_do_nothing(llama)
    engine.__class__ = Mumbling
    audited = rewarding(engine, Vowels()).run()
    assert probe(audited, "parity").status is probe(audited, "sampling").status is Outcome.PASS
    assert probe(audited, "rewards").status is Outcome.FAIL
    assert (audited.record.verdict, audited.record.guilty) == (Outcome.FAIL, "engine")
    (cause,) = audited.record.causes
    assert (cause.cause, cause.found_by) == ("unexplained", "rewards")
    assert "mean reward of the engine 0, of the reference" in cause.evidence


def test_an_engine_at_another_temperature_fails_by_its_cause_with_rewards_as_evidence(rewarding, llama):
    class Hot(ReferenceBackend):
        def generate(self, requests):
            hotter = [
                Request(r.prompt, msgspec.structs.replace(r.sampling, temperature=1.4)) for r in requests
            ]
            return super().generate(hotter)

    engine = able_to_do_nothing(llama)
    engine.__class__ = Hot

    class Fluent(Vowels):
        def reward(self, prompt, completion):
            return sum(llama.score([completion.sequence])[0][-len(completion.token_ids) :])

    audited = rewarding(engine, Fluent()).run()
    assert probe(audited, "rewards").status is Outcome.FAIL
    assert [cause.cause for cause in audited.record.causes if cause.gating] == ["semantic/temperature"]


def _raise(text: str) -> float:
    raise KeyError("no answer key")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda text: float("nan"), "task 'vowels' gave nan as the reward of an answer to prompt 0"),
        (lambda text: None, "task 'vowels' gave None as the reward of an answer to prompt 0"),
        (_raise, "task 'vowels' failed on an answer to prompt 0: KeyError: 'no answer key'"),
    ],
)
def test_a_task_that_fails_is_not_judged_and_not_passed(audit, llama, tmp_path, reward, says):
    audited = audit(able_to_do_nothing(llama), task=Vowels(reward)).run()
    record = probe(audited, "rewards")
    assert (record.status, record.required, record.vacuous) == (Outcome.INCONCLUSIVE, True, False)
    assert record.message.startswith(says)
    assert audited.record.verdict is Outcome.INCONCLUSIVE
    assert not (tmp_path / "reference.jsonl").exists(), "told before the reference was asked for its own"


# --- the guard --------------------------------------------------------------------------------------------------


GATES = Gates(1e-5, 2.5e-5, 1e-6, 2.0)


def test_a_probe_that_answers_is_timed(audit, scripted):
    result = guarded(Probe.REPEAT, lambda: answered(Probe.REPEAT, Outcome.PASS, "fine"))
    assert result.record.status is Outcome.PASS
    assert result.record.seconds >= 0.0


@pytest.mark.parametrize(
    ("error", "required"),
    [
        (EngineUnreachable("no answer within 60 s"), True),
        (BadAnswer("half an answer"), True),
        # Ids that the reference cannot score came back in the middle of a probe.
        (InvalidPrompt("token 3 is 5000"), True),
        (MemoryError("no room"), True),
        # What an engine cannot do by design is no failure of this engine today.
        (CapabilityMissing("a context of 40 tokens"), False),
    ],
)
def test_a_probe_that_the_engine_does_not_survive_is_not_judged(audit, scripted, error, required):
    def fail():
        raise error

    result = guarded(Probe.REPEAT, fail)
    assert result.record.status is Outcome.INCONCLUSIVE
    assert result.record.required is required
    assert str(error) in result.record.message


def test_a_mistake_of_our_own_is_not_hidden(audit, scripted):
    for mistake in (KeyError("ours"), RuntimeError("ours")):

        def fail(error=mistake):
            raise error

        with pytest.raises(type(mistake)):
            guarded(Probe.REPEAT, fail)


def consistency(audit: Audit) -> list[ProbeResult]:
    return ProbeSuite(audit, GATES).consistency(semantic=False)


def test_an_engine_that_can_do_nothing_leaves_a_required_question_open(audit, scripted):
    results = consistency(audit(scripted(None, capabilities=frozenset())))
    assert {result.record.status for result in results} == {Outcome.INCONCLUSIVE}
    (asked,) = [result.record for result in results if result.record.required]
    assert asked.name == "self-consistency"
    assert "repeat, batch, cache, stream, prefill-decode" in asked.message


def test_a_context_too_short_for_the_probes_is_said_so(audit, scripted):
    (result,) = consistency(audit(scripted(None, max_model_len=40)))
    assert "context of 40" in result.record.message
    assert (result.record.status, result.record.required) == (Outcome.INCONCLUSIVE, True)


def test_what_the_user_asked_for_and_the_engine_cannot_do_is_not_passed(audit, llama, tmp_path):
    class Fixed(ReferenceBackend):
        capabilities = ReferenceBackend.capabilities - {
            Capability.LOAD_WEIGHTS,
            Capability.SEED,
            Capability.SCORE,
        }

    class Broken:
        def score(self, sequences):
            return []

    engine = Fixed("testbed:llama", dtype="float32")
    # As llama.cpp's: a file, beside which no perturbed checkpoint can be written.
    served = tmp_path / "model.gguf"
    served.touch()
    audited = audit(engine, checkpoint=served, trainer=Broken()).run()
    for name in ("trainer", "weight-sync"):
        assert probe(audited, name).required
        assert probe(audited, name).status is Outcome.INCONCLUSIVE
    assert "load-weights" in probe(audited, "weight-sync").message
    assert "0 rows of scores" in probe(audited, "trainer").message


def test_the_same_seed_gives_the_same_verdict(audit, llama, tmp_path):
    engine = able_to_do_nothing(llama)
    enough = ValidationConfig(num_prompts=4, equivalence_trials=30, max_tokens=8)
    records = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run = audit(
            engine,
            validation=enough,
            sampling=SamplingParams(temperature=0.7, max_tokens=8),
            directory=tmp_path / name,
        )
        record = run.run().record
        probes = tuple(msgspec.structs.replace(each, seconds=0.0) for each in record.probes)
        records.append(msgspec.structs.replace(record, probes=probes))
    assert records[0] == records[1]
    assert records[0].metrics["tokens"] >= 200


def test_one_long_sequence_is_not_enough_for_a_verdict(audit, completion, scripted):
    """Words at random, far from what was asked for: nothing says how one sequence varies, and nothing crashes."""
    output = tuple(np.random.default_rng(0).integers(4, 500, 210).tolist())
    engine = scripted(
        lambda request, number: Answer((completion(request.prompt.token_ids, output),)),
        capabilities=frozenset(),
    )
    once = ValidationConfig(num_prompts=1, equivalence_trials=1, max_tokens=210)
    audited = audit(engine, sampling=SamplingParams(max_tokens=210), validation=once).run()
    assert probe(audited, "parity").vacuous
    assert probe(audited, "sampling").status is Outcome.FAIL
    assert audited.record.verdict is Outcome.FAIL
    assert [(each.cause, each.found_by) for each in audited.record.causes] == [("unexplained", "sampling")]


@pytest.mark.parametrize("used", [True, False])
def test_a_pass_says_first_which_parameters_are_not_honoured(used):
    """Beside a healthy one, which says nothing more than that."""
    cause = found("semantic/sampling-bias", "vllm", Probe.PARAMETERS, "top_p is not honoured", gating=used)
    sound = [answered(each, Outcome.PASS, "") for each in (Probe.PARITY, Probe.SAMPLING)]
    status = Outcome.FAIL if used else Outcome.PASS
    off = answered(Probe.PARAMETERS, status, "top_p is not honoured", causes=(cause,))
    decision = _with_aside(decide([*sound, off], (), Circumstances()))
    assert decision.verdict is status
    healthy = _with_aside(decide(sound, (), Circumstances()))
    assert healthy.verdict is Outcome.PASS
    assert ("top_p" in decision.message) is not used
    assert "top_p" not in healthy.message


def test_weights_that_were_widened_on_loading_are_the_checkpoints(tmp_path):
    """The exact engine holds a checkpoint of bf16 in fp32: the same values, and no difference in meaning."""
    models.load("testbed:llama").bfloat16().save_pretrained(tmp_path / "bf16")
    reference = ReferenceBackend(tmp_path / "bf16", tokenizer=models.tokenizer("testbed:llama"))
    held = models.load(tmp_path / "bf16", dtype="float32")

    def of(digest, dtype="float32"):
        return EngineFingerprint(
            engine="exact", semantic={"weights": digest}, numeric={"dtype": dtype}, deployment={}
        )

    digest = model_digest(held)
    assert digest != reference.version.digest
    assert named_alike(of(digest), reference).semantic["weights"] == reference.version.digest
    with torch.no_grad():
        held.model.norm.weight[0] += 1e-6
    other = of(model_digest(held))
    assert named_alike(other, reference) == other
    # Narrowed, and so other values: an engine in bf16 on a checkpoint of fp32.
    wide = ReferenceBackend("testbed:llama")
    narrowed = of(model_digest(models.load("testbed:llama", dtype="bfloat16")), "bfloat16")
    assert named_alike(narrowed, wide) == narrowed
