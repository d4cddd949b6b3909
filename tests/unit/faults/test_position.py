import numpy as np
import numpy.typing as npt
import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import the_reference

IDS = tuple((31 * place) % 500 + 4 for place in range(150))


def errors(spec: str, engine: ReferenceBackend) -> npt.NDArray[np.float64]:
    """Difference of the score of tokens 1…, by position."""
    broken, honest = resolve(spec).inject(engine).score([IDS])[0], engine.score([IDS])[0]
    return np.abs(np.subtract(broken, honest, dtype=np.float64))


@pytest.mark.parametrize("variant", ["theta-doubled", "theta-of-another-family", "positions-stretched"])
def test_rotary_positions_are_off(variant: str, llama: ReferenceBackend) -> None:
    error = errors(f"path/rope:{variant}", llama)
    # The logits of the first position have no other position to look at.
    assert error[0] < 1e-12
    assert error[1:].mean() > 0.05


@pytest.mark.parametrize(("name", "theta"), [("llama", 500_000.0), ("qwen2", 10_000.0)])
def test_the_other_family_is_another_one(name: str, theta: float) -> None:
    engine = ReferenceBackend(f"testbed:{name}")
    model = the_reference(resolve("path/rope:theta-of-another-family").inject(engine)).model
    expected = theta ** -(torch.arange(0, 64, 2).double() / 64)
    assert torch.allclose(model.base_model.rotary_emb.inv_freq.double(), expected, rtol=1e-5)
    assert engine.model.config.rope_parameters["rope_theta"] != theta


@pytest.mark.parametrize("boundary", [16, 64])
def test_numbers_go_wrong_at_the_boundary(boundary: int, llama: ReferenceBackend) -> None:
    error = errors(f"path/context-boundary:page-{boundary}", llama)
    # Entry i is the score of token i + 1, from the logits of position i.
    assert error[:boundary].max() < 1e-12
    assert error[boundary] > 1e-6
    assert error[boundary:].mean() > 1e-3


@pytest.mark.parametrize(("variant", "unharmed"), [("ignored", 64), ("halved", 32)])
def test_the_window_has_another_width(variant: str, unharmed: int, mistral: ReferenceBackend) -> None:
    error = errors(f"path/window:{variant}", mistral)
    assert error[:unharmed].max() < 1e-9
    assert error[unharmed] > 1e-9
    assert error[unharmed:].mean() > 0.01
    assert mistral.model.config.sliding_window == 64


def test_a_window_is_ignored_in_decoding_too(mistral: ReferenceBackend) -> None:
    """Or the cache would still forget what is behind it."""
    broken = the_reference(resolve("path/window:ignored").inject(mistral))
    whole = broken.score([IDS])[0]
    rows = broken.teacher.continued(IDS, 1, broken.model, 100)
    logprobs = torch.log_softmax(rows, dim=-1)[torch.arange(149), torch.tensor(IDS[1:])]
    assert logprobs.tolist() == pytest.approx(whole, abs=1e-5)
