"""The bits are looked at while the engine runs, by another path: what no proof at start-up asked is caught here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.engine.support import PROMPT, Make, changed, finished, seeded

from zerodrift.core.errors import BitsDiffer, InvalidValue
from zerodrift.engine.engine import Engine
from zerodrift.exact.ops.cpu.op_set import CpuOps

LAST_BITS = 1 + 2.0**-20


def counts(engine: Engine) -> tuple[int, int]:
    return engine.metrics().checked_samples, engine.metrics().unchecked_samples


@pytest.mark.parametrize(("interval", "expected"), [(1, 14), (4, 3), (14, 1), (15, 0), (0, 0)])
def test_one_in_so_many_is_checked(engine_of: Make, interval: int, expected: int) -> None:
    engine = engine_of(logprob_check_interval=interval)
    engine.generate([[number, 3] for number in range(1, 8)], seeded(n=2))
    assert counts(engine) == (expected, 0)
    assert (engine.metrics().check_seconds > 0) is (expected > 0)


@pytest.mark.parametrize("interval", [-1, 1.5, True, "64"])
def test_an_interval_is_a_count(engine_of: Make, interval: Any) -> None:
    with pytest.raises(InvalidValue):
        engine_of(logprob_check_interval=interval)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_every_kind_of_sampling_holds(engine_of: Make, mode: str) -> None:
    engine = engine_of(logprob_check_interval=1, logprobs_mode=mode, num_blocks=24)
    params = [
        seeded(temperature=0.0),
        seeded(temperature=0.6, top_p=0.9, n=3),
        seeded(top_k=5, repetition_penalty=1.2, frequency_penalty=0.3),
        seeded(min_tokens=3, stop_token_ids=(9,), ignore_eos=False),
        seeded(logit_bias={4: 2.0}, min_p=0.02, prompt_logprobs=2),
    ]
    engine.generate([[*PROMPT, number] for number in range(5)], params, forced=[[7, 8], [], [], [], []])
    assert counts(engine) == (7, 0)


def test_what_ends_by_an_error_or_an_abort_is_not_counted(engine_of: Make) -> None:
    engine = engine_of(logprob_check_interval=1)
    engine.abort(engine.add_request(PROMPT, seeded()))
    engine.generate([PROMPT], seeded(top_k=1), forced=[[60]], on_error="return")
    assert counts(engine) == (0, 0)


@pytest.mark.parametrize(("kv", "expected"), [("recompute", (1, 0)), ("keep", (0, 1))])
def test_a_swap_in_flight(engine_of: Make, kv: str, expected: tuple[int, int]) -> None:
    """Recomputed KV is the new weights' own from the swap on; what straddles it nobody can score again."""
    engine = engine_of(logprob_check_interval=1)
    engine.add_request(PROMPT, seeded(max_tokens=12))
    for _ in range(3):
        engine.step()
    engine.swap_weights(changed(engine), "b", kv=kv)
    finished(engine)
    assert counts(engine) == expected


def test_kept_kv_stays_unchecked_though_it_was_recomputed_later(engine_of: Make) -> None:
    engine = engine_of(logprob_check_interval=1)
    engine.add_request(PROMPT, seeded(max_tokens=12))
    for kv in ("keep", "recompute"):
        engine.step()
        engine.step()
        engine.swap_weights(changed(engine, 1.1), kv, kv=kv)
    finished(engine)
    assert counts(engine) == (0, 1)


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor, Any], bool]) -> None:
    """Attention over pages whose last bits are off where `wrong` says so. The proof at start-up asks nothing of it."""
    real = CpuOps.attend_paged

    def attend(self: CpuOps, q: torch.Tensor, kv: Any, step: Any, shape: Any) -> torch.Tensor:
        out = real(self, q, kv, step, shape)
        return out * LAST_BITS if wrong(q, step) else out

    monkeypatch.setattr(CpuOps, "attend_paged", attend)


def test_an_op_that_no_proof_sees_stops_the_engine(engine_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda q, step: len(q) == 1)
    engine = engine_of(logprob_check_interval=1)
    with pytest.raises(BitsDiffer) as caught:
        engine.generate([PROMPT], seeded())
    assert "attention at model.layers.0.self_attn.o_proj" in str(caught.value)
    for call in (engine.step, lambda: engine.generate(PROMPT), engine.reset_cache):
        with pytest.raises(BitsDiffer):
            call()


def test_an_op_that_is_wrong_in_company_alone_is_named_too(
    engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda q, step: len(q) == 2)
    engine = engine_of(logprob_check_interval=1)
    engine.generate([PROMPT], seeded())
    with pytest.raises(BitsDiffer, match=r"attention at model\.layers\.0\.self_attn\.o_proj"):
        engine.generate([PROMPT, [1, 2, 3]], [seeded(), seeded(max_tokens=9)])


def test_it_takes_its_turn(engine_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is stopped before the sample whose turn it is."""
    plant(monkeypatch, lambda q, step: len(q) == 1)
    engine = engine_of(logprob_check_interval=3)
    for _ in range(2):
        assert engine.generate(PROMPT, seeded())[0].problem is None
    with pytest.raises(BitsDiffer):
        engine.generate(PROMPT, seeded())


def test_without_it_nothing_is_seen(engine_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda q, step: len(q) == 1)
    assert engine_of(logprob_check_interval=0).generate(PROMPT, seeded())[0].problem is None
