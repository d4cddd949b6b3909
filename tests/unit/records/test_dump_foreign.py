import json
from typing import Any

import pytest

from zerodrift.core.errors import InvalidCompletion, RecordError
from zerodrift.core.request import SamplingParams
from zerodrift.records.dump import DumpReader
from zerodrift.records.dump_fields import LinePlace
from zerodrift.records.dump_foreign import read_nemo_rl
from zerodrift.records.dump_formats import READERS, DumpFormat, detect

PLACE = LinePlace("train_data_step12.jsonl", 1, SamplingParams())
# A batch of one around each column, padding on the right, zeros where nothing was sampled.
NEMO_RL: dict[str, Any] = {
    "content": ["text"],
    "rewards": [1.0],
    "input_lengths": [6],
    "token_ids": [[5, 6, 7, 8, 9, 10, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 0, 1, 0, 0]],
    "sample_loss_mask": [1.0],
    "advantages": [[0.5] * 8],
    "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, 0.0, -0.3, 0.0, 0.0]],
    "prev_logprobs": [[0.0, -1.0, -0.11, -0.21, -2.0, -0.31, -9.0, -9.0]],
    "idx": 0,
}
VERL: dict[str, Any] = {
    "prompts": [0, 0, 5, 6],
    "responses": [7, 8, 0],
    "attention_mask": [0, 0, 1, 1, 1, 1, 0],
    "response_mask": [1, 1, 0],
    "rollout_log_probs": [-0.1, -0.2, 0.0],
    "old_log_probs": [-0.11, -0.21, 0.0],
    "step": 3,
}
TRL: dict[str, Any] = {
    "prompt_ids": [0, 0, 5, 6],
    "prompt_mask": [0, 0, 1, 1],
    "completion_ids": [7, 8, 0],
    "completion_mask": [1, 1, 0],
    "sampling_per_token_logps": [-0.1, -0.2, 0.0],
    "old_per_token_logps": [-0.11, -0.21, 0.0],
}


@pytest.mark.parametrize(("form", "fields"), [("nemo-rl", NEMO_RL), ("verl", VERL), ("trl", TRL)])
def test_every_writer_is_known_by_its_fields(form, fields):
    assert detect(fields) == form
    first = READERS[DumpFormat(form)](fields, PLACE)[0]
    assert (first.prompt, first.output) == ((5, 6), (7, 8))
    assert (first.logprobs, first.trainer_logprobs) == ((-0.1, -0.2), (-0.11, -0.21))
    assert first.step == {"nemo-rl": 12, "verl": 3, "trl": None}[form]


def test_turns_of_nemo_rl_are_rollouts_of_their_own():
    _, second = read_nemo_rl(NEMO_RL, PLACE)
    assert (second.prompt, second.output, second.logprobs) == ((5, 6, 7, 8, 9), (10,), (-0.3,))


def test_columns_without_a_batch_around_them_are_one_row():
    columns = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
    assert read_nemo_rl(NEMO_RL | {name: NEMO_RL[name][0] for name in columns}, PLACE) == read_nemo_rl(
        NEMO_RL, PLACE
    )


def test_a_file_without_a_step_in_its_name_has_none():
    assert read_nemo_rl(NEMO_RL, PLACE._replace(source="d.jsonl"))[0].step is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"token_loss_mask": None}, RecordError),
        ({"generation_logprobs": [[-0.1] * 4]}, InvalidCompletion),
        ({"generation_logprobs": [[-0.1] * 8] * 2}, InvalidCompletion),
        ({"input_lengths": [6, 6]}, InvalidCompletion),
    ],
)
def test_what_does_not_belong_together_is_refused(changes, error):
    with pytest.raises(error):
        read_nemo_rl({**NEMO_RL, **changes}, PLACE)


@pytest.mark.parametrize(
    ("fields", "writer"),
    [
        ({"input": "a", "output": "b", "gts": "", "score": 1.0, "step": 2}, "verl's rollout_data_dir"),
        ({"step": 1, "prompt": "a", "completion": "b", "advantage": 0.1}, "TRL's table of completions"),
        ({"content": ["a"], "rewards": [1], "generation_logprobs": [[-1.0]]}, "NeMo-RL before"),
    ],
)
def test_text_alone_is_refused_by_line_and_writer(fields, writer, tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    with pytest.raises(RecordError) as caught:
        DumpReader().read(path)
    assert str(caught.value).startswith(f"dump.jsonl, line 1: this is {writer}")


def test_a_directory_of_nemo_rl_is_read_in_the_order_of_steps(tmp_path):
    for step in (10, 2):
        (tmp_path / f"train_data_step{step}.jsonl").write_text(json.dumps(NEMO_RL) + "\n")
    dump = DumpReader().read(tmp_path)
    assert [rollout.step for rollout in dump.rollouts] == [2, 2, 10, 10]
    assert dump.format is DumpFormat.NEMO_RL
