from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Request
from zerodrift.core.version import WeightVersion
from zerodrift.faults.damage import Damaged
from zerodrift.faults.registry import resolve

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]


def test_a_damage_that_does_nothing_changes_nothing(llama: ReferenceBackend, ask: Ask) -> None:
    whole = Damaged(llama, lambda model: None)
    assert whole.generate(ask(9, 20)) == llama.generate(ask(9, 20))
    assert whole.score([(1, 2, 3)]) == llama.score([(1, 2, 3)])


def test_the_model_handed_in_stays_whole(llama: ReferenceBackend) -> None:
    before = llama.score([tuple(range(4, 60))])
    state = {name: tensor.clone() for name, tensor in llama.model.state_dict().items()}
    resolve("path/weight-quantisation").inject(llama)
    resolve("path/body-precision").inject(llama)
    assert llama.score([tuple(range(4, 60))]) == before
    assert all(torch.equal(tensor, llama.model.state_dict()[name]) for name, tensor in state.items())


@pytest.mark.parametrize("spec", ["path/head-precision", "path/body-precision", "path/rope"])
def test_a_fault_of_the_path_outlives_an_update_and_hides(
    spec: str, llama: ReferenceBackend, updated: ReferenceBackend, update: Path, ask: Ask, tell: Tell
) -> None:
    broken = resolve(spec).inject(llama)
    broken.load_weights(update, WeightVersion("new"))
    assert llama.version.label == "initial", "the engine handed in was updated too"
    sequence = [tuple(range(4, 60))]
    assert broken.score(sequence) != updated.score(sequence)
    assert broken.score(sequence) != resolve(spec).inject(llama).score(sequence)
    assert broken.fingerprint() == updated.fingerprint()
    (completion,) = tell(broken.generate(ask(9)))
    assert completion.versions[0].version == updated.version
    assert completion.fingerprint == updated.fingerprint().digest
