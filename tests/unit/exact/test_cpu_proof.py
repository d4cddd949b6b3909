"""Each shape is asked about by itself, before its first call: an op that is wrong for one of them is caught or padded."""

import threading
from typing import Any

import pytest
import torch

from zerodrift.core.errors import Unproven
from zerodrift.core.request import SamplingParams
from zerodrift.exact import probe
from zerodrift.exact.logprobs import processed
from zerodrift.exact.ops.cpu import blocks, proof
from zerodrift.exact.ops.cpu.linear import pack
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.interface import HeadShape, Parts, RowOp, Segments
from zerodrift.sampler.processing import TokenHistory

real_scores, real_sums, real_linear = blocks.scores, blocks.sums_by_block, proof.linear


@pytest.fixture(autouse=True)
def nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_proven", {})
    monkeypatch.setattr(proof, "_attention", {})
    monkeypatch.setattr(proof, "_rows", {})


def attended(heads: int, kv: int, lengths: tuple[int, ...] = (1, 70)) -> torch.Tensor:
    """Attention of some sequences, one after another."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(sum(lengths), n, 16, generator=generator) for n in (heads, kv, kv))
    starts = tuple(sum(lengths[:index]) for index in range(len(lengths)))
    ends = tuple(start + length for start, length in zip(starts, lengths, strict=True))
    return CpuOps().attend(q, (k, v), Segments(starts, ends), HeadShape(0.25, None))


def off(x: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(x, torch.tensor(torch.inf))


def wrong_scores(pairs: int, below: int) -> Any:
    """Scores of so many pairs, with fewer rows than `below`, are off by one bit."""

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = real_scores(q, k)
        return off(found) if q.shape[0] == pairs and q.shape[1] < below else found

    return scores


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_what_is_wrong_for_few_rows_of_some_pairs_is_padded(
    monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    expected = attended(pairs, pairs)
    monkeypatch.setattr(proof, "_proven", {})
    # Patched in both places: where it is asked about, and where it is called.
    wrong = wrong_scores(pairs, 12)
    monkeypatch.setattr(blocks, "scores", wrong)
    monkeypatch.setattr("zerodrift.exact.ops.cpu.attention.scores", wrong)
    assert probe.same_bits(attended(pairs, pairs), expected)
    taken = {key[1:3]: rows for key, rows in proof._proven.items() if key[0] == "attention"}
    assert taken[pairs, 1] == 12
    assert taken[pairs, 64] == 64


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_what_is_wrong_for_some_pairs_alone_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    monkeypatch.setattr(blocks, "scores", wrong_scores(pairs, 10**6))
    with pytest.raises(Unproven, match="attention of shape"):
        proof.prove_attention(16)


def test_what_start_up_did_not_ask_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = wrong_scores(5, 10**6)
    monkeypatch.setattr(blocks, "scores", wrong)
    monkeypatch.setattr("zerodrift.exact.ops.cpu.attention.scores", wrong)
    proof.prove_attention(16)
    attended(4, 4)
    with pytest.raises(Unproven, match=r"attention of shape \(5, 1, 16, 64"):
        attended(5, 5)


def test_wrong_sums_of_one_block_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single pair with a single block is a batch of one to the second product."""

    def wrong(*arguments: torch.Tensor) -> Any:
        for parts, sums in real_sums(*arguments):
            yield (off(parts) if parts.shape[:2] == (1, 1) else parts), sums

    monkeypatch.setattr(blocks, "sums_by_block", wrong)
    with pytest.raises(Unproven):
        proof.prove_attention(16)
    with pytest.raises(Unproven):
        attended(1, 1, (3,))
    attended(2, 2, (3,))


def test_rows_of_a_linear_are_padded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(torch.randn(7, 6)), torch.randn(9, 6)
    expected = CpuOps().linear(x, packed, None)
    proof._proven.clear()
    monkeypatch.setattr(
        proof, "linear", lambda rows, *rest: real_linear(rows, *rest) + (len(rows) in (1, 2, 3, 9))
    )
    assert proof.linear_rows(packed, None, 1) == 4
    assert proof.linear_rows(packed, None, 9) == 10
    assert probe.same_bits(CpuOps().linear(x, packed, None), expected)
    other = pack(torch.randn(7, 6))
    monkeypatch.setattr(proof, "linear", lambda rows, *rest: real_linear(rows, *rest) * torch.rand(1))
    with pytest.raises(Unproven, match=r"linear of shape \(7, 6, False, 5\)"):
        proof.linear_rows(other, None, 5)
    assert not any(key[4] == 5 for key in proof._proven)


def test_a_bias_may_be_trained_between_two_questions() -> None:
    packed, bias = pack(torch.randn(7, 6)), torch.randn(7)
    assert proof.linear_rows(packed, bias, 4) == 4
    bias += 1
    assert proof.linear_rows(packed, bias, 8) == 8


def test_a_shape_is_asked_about_once_per_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = probe.holds
    monkeypatch.setattr(probe, "holds", lambda *a: asked.append((a[2], torch.get_num_threads())) or real(*a))
    packed = pack(torch.randn(7, 6))
    for number in (1, 2, 1, 4, 2):
        with probe.threads(number):
            proof.linear_rows(packed, None, 8)
            proof.linear_rows(packed, None, 8)
    assert asked == [(8, 1), (8, 2), (8, 4)]


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 6), (6, 24)])
def test_an_op_on_rows_is_asked_about_the_rows_that_come(outputs: int, inputs: int) -> None:
    """Wrong for 37 rows only, which no start-up question has; before a linear, and after."""

    def op(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + (len(rows) == 37))

    ops, packed = CpuOps(), pack(torch.randn(outputs, inputs))
    ops.prove(Parts([(packed, None)], 16, {"activation": RowOp(op, 24), "norm of 16": RowOp(op, 16)}))
    for tokens in (1, 36, 38, 300):
        ops.linear(torch.randn(tokens, inputs), packed, None)
    with pytest.raises(Unproven, match="activation over 24"):
        ops.linear(torch.randn(37, inputs), packed, None)
    q, kv = torch.randn(37, 2, 16), torch.randn(37, 2, 16)
    with pytest.raises(Unproven, match="norm of 16"):
        ops.attend(q, (kv, kv), Segments((0,), (37,)), HeadShape(0.25, None))


def test_rows_of_heads_are_asked_about_where_a_single_kv_head_is_as_wide() -> None:
    """Its linear gives rows of that width too, but only one for each token."""

    def op(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + (len(rows) == 148))

    ops, packed = CpuOps(), pack(torch.randn(16, 6))
    ops.prove(Parts([(packed, None)], 16, {"norm of 16": RowOp(op, 16)}))
    ops.linear(torch.randn(37, 6), packed, None)
    q, kv = torch.randn(37, 4, 16), torch.randn(37, 1, 16)
    with pytest.raises(Unproven, match="norm of 16"):
        ops.attend(q, (kv, kv), Segments((0,), (37,)), HeadShape(0.25, None))


@pytest.mark.parametrize("rows", [2**16, 2**16 + 64])
def test_many_rows_are_asked_about_by_their_number(rows: int) -> None:
    def op(given: torch.Tensor) -> torch.Tensor:
        return given * (1 + (len(given) == 2**16 + 64))

    proofs = proof.RowProofs({"norm": RowOp(op, 32)})
    if rows == 2**16:
        proofs.require(32, rows)
    else:
        with pytest.raises(Unproven):
            proofs.require(32, rows)


def test_a_norm_may_be_trained_between_two_questions() -> None:
    norm = torch.nn.RMSNorm(16)
    rows = proof.RowProofs({"norm": RowOp(norm.forward, 16)})
    rows.require(16, 5)
    with torch.no_grad():
        norm.weight += 1
    rows.require(16, 6)


def test_a_thread_of_python_has_its_own_number_of_threads() -> None:
    """Which is why one may ask on one thread while another computes on two."""

    def mkl() -> str:
        return next(line for line in torch.__config__.parallel_info().splitlines() if "mkl_get" in line)

    found: list[object] = []

    def other() -> None:
        torch.set_num_threads(2)
        found.extend((torch.get_num_threads(), mkl()[-2:]))

    with probe.threads(1):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), mkl()[-2:]) == (1, " 1")
    assert found == [2, " 2"]


@pytest.mark.parametrize("name", ["log_softmax", "cumsum", "softmax"])
def test_a_sampler_works_on_groups_that_were_asked_about(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Six rows of a step of ten have parameters of their own, and no product has six rows."""
    owner = torch.Tensor if name == "cumsum" else torch
    real = getattr(owner, name)
    params = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01)
    history = [TokenHistory((5,), ())] * 10

    def wrong_for_six(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found = real(x, *rest, **options)
        return off(found) if len(x) == 6 else found

    logits = torch.randn(10, 97, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(owner, name, wrong_for_six)
    processed(logits, params, history)
    with pytest.raises(Unproven):
        processed(logits[:6], params, history[:6])
