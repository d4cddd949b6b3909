from zerodrift.core.completion import EngineFingerprint
from zerodrift.view.panels import Fact, compare


def fingerprint(engine: str, **numeric: str) -> EngineFingerprint:
    return EngineFingerprint(engine=engine, semantic={}, numeric=numeric, deployment={"host": engine})


def test_differences_come_first_and_silence_is_none() -> None:
    engine = fingerprint("vllm", torch="2.11", dtype="bfloat16", kernel="triton")
    reference = fingerprint("reference", torch="2.11", dtype="float32", attention="sdpa")
    semantic, numeric, deployment = compare(engine, reference)
    assert numeric.facts == (
        Fact("dtype", "bfloat16", "float32"),
        Fact("torch", "2.11", "2.11"),
        Fact("attention", None, "sdpa"),
        Fact("kernel", "triton", None),
    )
    assert [fact.differs for fact in numeric.facts] == [True, False, False, False]
    assert numeric.num_differing == 1
    assert semantic.facts == ()
    assert deployment.facts[0].differs
    assert numeric.engine_digest == engine.digests()["numeric"]
    assert numeric.reference_digest == reference.digests()["numeric"]
    assert [part.name for part in (semantic, numeric, deployment)] == ["semantic", "numeric", "deployment"]
