from pathlib import Path

import numpy as np
import pytest

from zerodrift.audit.trainers import TrainerOptions, TransformersTrainer, open_trainer
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import ConfigError, InvalidValue

MODEL = "testbed:llama"
SEQUENCES = [(0, 5, 6, 7, 8), (0, 9, 10), tuple(range(4, 40)), (0, 11), (3, 4, 5, 6)]


def gap(trainer: TransformersTrainer, reference: ReferenceBackend) -> float:
    ours, theirs = trainer.score(SEQUENCES), reference.score(SEQUENCES)
    assert [len(row) for row in ours] == [len(ids) - 1 for ids in SEQUENCES]
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())


@pytest.mark.parametrize(
    "spec", ["transformers", "transformers:packed=true", "transformers:batch=2, packed=true"]
)
def test_a_sound_forward_is_the_reference(spec, llama):
    trainer = open_trainer(spec, MODEL)
    assert isinstance(trainer, TransformersTrainer)
    assert gap(trainer, llama) < 1e-5


@pytest.mark.parametrize("spec", ["transformers:autocast=bfloat16", "transformers:dtype=bfloat16"])
def test_less_precision_shows(spec, llama):
    trainer = open_trainer(spec, MODEL)
    assert isinstance(trainer, TransformersTrainer)
    assert 1e-3 < gap(trainer, llama) < 1.0


def test_a_packed_sequence_does_not_see_the_one_before_it():
    trainer = TransformersTrainer(MODEL, TrainerOptions(packed=True, batch=2))
    first, other = trainer.score([(7, 8, 9, 10), (0, 5, 6)]), trainer.score([(11, 12), (0, 5, 6)])
    assert first[1] == pytest.approx(other[1], abs=1e-5)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "their_trainer.py").write_text(
        "class Scorer:\n"
        "    def __init__(self, model='none'):\n"
        "        self.model = model\n"
        "    def score(self, sequences):\n"
        "        return [[-1.0] * (len(ids) - 1) for ids in sequences]\n"
        "ready = Scorer()\n"
        "number = 3\n"
        "def fails(model):\n"
        "    raise SystemExit(0)\n"
        "def gives_nothing(model):\n"
        "    return None\n"
    )
    (tmp_path / "broken_trainer.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return tmp_path


def test_an_object_of_ones_own(module):
    scorer = open_trainer("their_trainer:ready", MODEL)
    assert scorer.score([(1, 2, 3)]) == [[-1.0, -1.0]]


def test_a_class_or_function_is_called_with_the_model(module):
    scorer = open_trainer("their_trainer:Scorer", Path("some/model"))
    assert scorer.model == "some/model"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nonsense", "names nothing; write transformers"),
        (":scorer", "names nothing"),
        ("their_trainer:", "names nothing"),
        ("no_such_trainer:scorer", "no module 'no_such_trainer' here or installed"),
        ("their_trainer:missing", "has no 'missing'"),
        ("their_trainer:number", "is int, which has no method"),
        ("their_trainer:fails", "could not be made: SystemExit"),
        ("their_trainer:gives_nothing", "is NoneType, which has no method"),
        ("transformers:dtpe=float32", "unknown field `dtpe`; options are dtype, autocast, packed, batch"),
        ("transformers:dtype=int7", "dtype is 'int7'"),
        ("transformers:autocast=int7", "dtype is 'int7'"),
        ("transformers:packed=perhaps", "Expected `bool`"),
        ("transformers:batch=0", "at least one sequence"),
    ],
)
def test_what_names_no_trainer_is_refused(module, spec, says):
    with pytest.raises(ConfigError, match=says):
        open_trainer(spec, MODEL)


def test_an_error_inside_the_users_module_is_the_users(module):
    with pytest.raises(
        ConfigError, match=r"could not be made: ModuleNotFoundError: .*no_such_module_anywhere"
    ):
        open_trainer("broken_trainer:scorer", MODEL)


def test_options_are_checked(llama):
    with pytest.raises(InvalidValue):
        TrainerOptions(batch=0)
