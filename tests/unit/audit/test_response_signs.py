"""What may be called rounding, and what to type about it."""

import msgspec
import pytest

from zerodrift.audit.attribute import Attribution, Channel, SelectedCause
from zerodrift.audit.explain import attributed
from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.audit.response.answer import Localisation
from zerodrift.audit.response.signs import Signs, settled
from zerodrift.config.precision import Precision
from zerodrift.core.cause import CAUSES
from zerodrift.records.evidence import AgreementEvidence, HeadEvidence, LocatedEvidence
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe

BODY, ROPE, INT4 = "path/body-precision", "path/rope", "path/weight-quantisation"
F32 = {"dtype": "float32", "quantization": "null", "kv_cache_dtype": "auto"}
HEAD = LocatedEvidence(
    layer=2,
    part="attention head",
    index=3,
    quantity="output",
    estimate=0.99,
    low=0.989,
    high=0.991,
    neutral=1.0,
    r2=0.998,
)
NOTHING = Localisation(r2=0.01, null=0.0, follows=False)
LOCATED = Localisation(r2=0.998, null=0.02, follows=True, knobs=(HEAD,), to_floor=True, share=0.997)
PARTLY = msgspec.structs.replace(LOCATED, to_floor=False, share=0.6)


def by_size(engine: str = "vllm") -> CauseFound:
    return found(BODY, engine, FoundBy.SIZE, "Δ has the size of bf16 rounding", explained=0.9, gating=True)


def selected(name: str = BODY, channel: Channel = Channel.SIZE, explained: float = 0.9) -> SelectedCause:
    return SelectedCause(name, "why", explained, (0.8, 1.0), 20, 55.0, channel)


def disagreeing(probe: Probe, mean: float, differing: int = 40) -> ProbeResult:
    evidence = AgreementEvidence(tokens=50, differing=differing, mean=mean, max=3 * mean)
    return answered(probe, Outcome.PASS, "", evidence)


@pytest.mark.parametrize(
    "signs",
    [
        Signs({"dtype": "torch.bfloat16"}),
        Signs({**F32, "quantization": "fp8"}),
        Signs({**F32, "kv_cache_dtype": "fp8_e4m3"}),
        Signs({"dtype": "float32", "quantization": "Q4_K"}),
        Signs(F32, Precision.BF16),
        Signs(F32, results=(disagreeing(Probe.PREFILL_DECODE, 4e-3),), mean=1e-2),
        Signs(F32, results=(disagreeing(Probe.BATCH, 9e-3),), mean=1e-2),
        Signs(
            F32,
            results=(
                answered(
                    Probe.HEAD_PRECISION,
                    Outcome.PASS,
                    "",
                    HeadEvidence(),
                    causes=(found("path/head-precision", "vllm", Probe.HEAD_PRECISION, ""),),
                ),
            ),
        ),
    ],
)
def test_rounding_that_something_shows_keeps_its_name(signs):
    (cause,) = settled([by_size()], signs, "vllm")
    assert (cause.cause, cause.gating, cause.explained) == (BODY, True, 0.9)
    assert signs.of_rounding[0] in cause.evidence


@pytest.mark.parametrize(
    "signs",
    [
        Signs({}),
        Signs(F32),
        Signs({**F32, "head_dtype": "model"}),
        Signs({"dtype": "float32", "quantization": "F32"}),
        Signs(F32, results=(disagreeing(Probe.PREFILL_DECODE, 1e-3),), mean=1e-2),
        # What a cache or a repeated request shows is another fault.
        Signs(F32, results=(disagreeing(Probe.CACHE, 1e-2), disagreeing(Probe.REPEAT, 1e-2)), mean=1e-2),
        Signs(F32, results=(disagreeing(Probe.BATCH, 0.0, differing=0),), mean=0.0),
    ],
)
def test_size_alone_is_no_rounding(signs):
    (cause,) = settled([by_size()], signs, "vllm")
    assert (cause.cause, cause.gating, cause.explained) == ("unexplained", True, 0.0)
    assert signs.to_know in cause.fix
    # What is in force already is not typed again.
    assert ("--dtype float32" in cause.fix) is (signs.numeric.get("dtype") is None)


@pytest.mark.parametrize(
    ("engine", "numeric", "typed"),
    [
        ("vllm", F32, "TRITON_F32_DEFAULT=ieee"),
        ("sglang", {"dtype": "torch.float32"}, "in force already"),
        ("vllm", {"dtype": "bfloat16"}, CAUSES[BODY].fix("vllm")),
        # It keeps fp32 between operations by itself: the fix is about the file.
        ("llama-cpp", {"dtype": "float32", "quantization": "Q8_0"}, CAUSES[BODY].fix("llama-cpp")),
    ],
)
def test_a_fix_in_force_is_no_fix(engine, numeric, typed):
    (cause,) = settled([by_size(engine)], Signs(numeric, Precision.BF16), engine)
    assert cause.fix == typed or (typed in cause.fix and cause.fix != CAUSES[BODY].fix(engine))


def test_causes_found_by_value_are_left_alone():
    causes = (found(ROPE, "vllm", FoundBy.VALUE, "base"), found(INT4, "vllm", FoundBy.VALUE, "4 bits"))
    assert settled(causes, Signs(F32), "vllm") == causes


@pytest.mark.parametrize("channel", [Channel.SIZE, Channel.REPORTED])
def test_what_is_located_is_unexplained_and_nothing_else(channel):
    attribution = Attribution(
        (selected("semantic/temperature", Channel.REPORTED), selected(channel=channel)), 2.0, True
    )
    (cause,) = attributed(msgspec.structs.replace(attribution, response=LOCATED), "vllm", "shape")
    assert (cause.cause, cause.gating, cause.explained) == ("unexplained", True, 0.997)
    assert cause.located == (HEAD,)
    assert "layer 2, attention head 3, output × 0.9900 [0.9890, 0.9910], R² 1.00" in cause.evidence
    assert "layer 2, attention head 3" in cause.fix
    # Nothing that settles rounding has a word in it.
    assert settled((cause,), Signs(F32), "vllm") == (cause,)


def test_what_is_followed_in_part_refutes_size_and_no_value():
    attribution = Attribution((selected(INT4, Channel.REPORTED, 0.6), selected()), 2.0, True, PARTLY)
    (cause,) = attributed(attribution, "vllm", "shape")
    assert cause.cause == INT4
    alone = attributed(Attribution((selected(),), 2.0, True, PARTLY), "vllm", "shape")
    assert [each.cause for each in alone] == ["unexplained"]
    assert alone[0].located == ()
    assert HEAD.message in alone[0].evidence


def test_what_nothing_locates_stays_as_it_was_found():
    (cause,) = attributed(Attribution((selected(),), 2.0, True, NOTHING), "vllm", "shape")
    assert (cause.cause, cause.found_by) == (BODY, FoundBy.SIZE)
    (unnamed,) = attributed(Attribution((), 9.0, False, NOTHING), "vllm", "shape")
    assert unnamed.cause == "unexplained"
    assert NOTHING.message in unnamed.evidence


def test_rounded_weights_are_a_sign_by_themselves():
    followed = msgspec.structs.replace(NOTHING, rounding=0.41)
    causes = attributed(Attribution((selected(),), 2.0, True, followed), "trainer", "shape")
    (cause,) = settled(causes, Signs(), "trainer")
    assert (cause.cause, cause.gating) == (BODY, True)
    assert "0.41" in cause.evidence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "layer 2, attention head 3, output × 0.9900 [0.9890, 0.9910], R² 1.00"),
        (
            {
                "layer": None,
                "index": None,
                "part": "all norms",
                "quantity": "eps",
                "estimate": 1e-5,
                "neutral": 1e-6,
            },
            "eps 1e-05",
        ),
        (
            {"quantity": "fp8", "part": "keys", "index": None, "estimate": 1.0},
            "layer 2, keys, in fp8, R² 1.00",
        ),
        ({"quantity": "bias", "part": "logit of token", "estimate": -0.2}, "logit of token 3, -0.2 ["),
        ({"estimate": -1e-9}, "output × 0.0000 ["),
        ({"alike": "layer 2, q norm gain"}, "(or layer 2, q norm gain)"),
    ],
)
def test_a_place_is_told_in_one_line(changes, words):
    assert words in msgspec.structs.replace(HEAD, **changes).message
