import pytest
import torch

from zerodrift.backends import teacher as teaching
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.errors import InvalidPrompt


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    ("ids", "start"), [((), 1), ((5,), 1), ((5, 6), 0), ((5, 6), 2), ((5, 512), 1), ((-1, 5), 1)]
)
def test_what_cannot_be_scored(reference, layout, ids, start):
    teacher = Teacher(reference.model, layout=layout)
    assert teacher.score([]) == []
    with pytest.raises(InvalidPrompt):
        list(teacher.logits([(5, 6, 7), ids], [1, start]))
    with pytest.raises(InvalidPrompt):
        teacher.continued(ids, start, reference.model, 0)


@pytest.mark.parametrize("split", [-1, 4, 100])
def test_a_prefix_that_is_none(reference, split):
    with pytest.raises(InvalidPrompt):
        Teacher(reference.model).continued((5, 6, 7), 1, reference.model, split)


def test_sequences_and_starts_are_as_many(reference):
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        list(Teacher(reference.model).logits([(5, 6), (7, 8)], [1]))


def test_scores_are_python_floats_of_every_token_but_the_first(reference):
    (scores,) = Teacher(reference.model).score([[9, 8, 7, 6]])
    assert len(scores) == 3
    assert all(type(value) is float and value < 0 for value in scores)


def test_half_precision_is_widened_before_the_softmax():
    engine = ReferenceBackend("testbed:llama", dtype="bfloat16")
    (scores,) = engine.score([(5, 6, 7, 8, 9)])
    logits_TV = next(engine.teacher.logits([(5, 6, 7, 8, 9)], [1]))
    assert logits_TV.dtype is torch.bfloat16
    expected = logits_TV.float().log_softmax(-1)[torch.arange(4), torch.tensor([6, 7, 8, 9])]
    assert scores == expected.tolist()


def test_batches_hold_so_many_sequences_and_so_many_logits(reference, monkeypatch):
    teacher = Teacher(reference.model, layout=Layout.PADDED, batch=3)
    assert list(teacher._batches([5] * 7)) == [(0, 3), (3, 6), (6, 7)]
    assert list(teacher._batches([])) == []
    # Two rows of five positions, 512 logits of 8 bytes each.
    monkeypatch.setattr(teaching, "LOGIT_BYTES", 2 * 5 * 512 * 8)
    assert list(teacher._batches([5] * 5)) == [(0, 2), (2, 4), (4, 5)]
    # A longer one fills the batch by itself, and one that never fits is computed all the same.
    assert list(teacher._batches([5, 9, 5, 100, 5])) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("layout", Layout)
def test_logits_come_a_few_rows_at_a_time(reference, monkeypatch, layout):
    """Where they would be too many, the head runs on a few rows, and gives the same numbers."""
    sequences, starts = [tuple(range(4, 4 + length)) for length in (30, 7, 12)], [3, 6, 1]
    teacher = Teacher(reference.model, layout=layout, batch=2)
    whole = list(teacher.logits(sequences, starts))
    head = reference.model.get_output_embeddings()
    sizes: list[int] = []
    watch = head.register_forward_hook(lambda _, __, logits: sizes.append(logits.numel() // 512))
    monkeypatch.setattr(teaching, "ROWS_BYTES", 5 * 512 * 8)
    pieces = list(teacher.logit_rows(sequences, starts))
    watch.remove()
    assert max(sizes) <= 5
    rows = [[piece for piece in pieces if piece.sequence == index] for index in range(3)]
    for own, expected in zip(rows, whole, strict=True):
        assert [piece.begin for piece in own] == [
            sum(len(before.logits_TV) for before in own[:number]) for number in range(len(own))
        ]
        assert torch.allclose(torch.cat([piece.logits_TV for piece in own]), expected, rtol=0, atol=1e-12)
    scores = list(teacher.logprobs(sequences, starts))
    for ids, start, found, expected in zip(sequences, starts, scores, whole, strict=True):
        assert torch.allclose(found, teaching.entries(expected, ids[start:]), rtol=0, atol=1e-12)


def test_the_attention_is_the_one_asked_for():
    engine = ReferenceBackend("testbed:llama")
    for attention in ("eager", "sdpa"):
        Teacher(engine.model, attention=attention).score([(5, 6, 7)])
        assert engine.model.config._attn_implementation == attention


def test_scoring_leaves_no_gradients_and_no_weights_changed():
    engine = ReferenceBackend("testbed:llama")
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    for layout in Layout:
        for logits_TV in Teacher(engine.model, layout=layout).logits([(5, 6, 7)], [1]):
            assert not logits_TV.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())


def test_positions_can_be_asked_about(reference):
    """Right ones change nothing; a jump shows from the token after it on."""
    sequences = [(5, 6, 7, 8, 9, 10), (9, 8, 7)]
    plain = Teacher(reference.model, layout=Layout.PADDED).score(sequences)
    same = Teacher(reference.model, layout=Layout.PADDED, positions=lambda positions: positions)
    assert same.score(sequences) == plain
    jumped = Teacher(
        reference.model, layout=Layout.PADDED, positions=lambda positions: positions + 5 * (positions >= 3)
    )
    long, short = jumped.score(sequences)
    assert long[:3] == pytest.approx(plain[0][:3], abs=1e-12)
    assert all(abs(one - other) > 1e-6 for one, other in zip(long[3:], plain[0][3:], strict=True))
    assert short == pytest.approx(plain[1], abs=1e-12)
