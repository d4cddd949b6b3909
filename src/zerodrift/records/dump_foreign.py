"""Lines as other trainers write them: the same numbers under other names, padded, and some with a batch of one around each.

    nemo-rl    train_data_stepN.jsonl: token_ids over prompt and output, token_loss_mask, input_lengths, generation_logprobs
               and prev_logprobs (the trainer's), each a list with one row; the step is in the name of the file
    verl       fields of its batches: prompts (padded on the left), responses (on the right), attention_mask,
               response_mask, rollout_log_probs, old_log_probs (the trainer's)
    trl        fields of its batches: prompt_ids, prompt_mask, completion_ids, completion_mask,
               sampling_per_token_logps, old_per_token_logps (the trainer's)

What verl puts into `rollout_data_dir` and TRL into its tables of completions is text without ids and logprobs. It is
refused by name, with what to write instead.
"""

import re
from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import InvalidCompletion, RecordError
from zerodrift.records.dump_fields import Fields, LinePlace, is_given, listed, numbers_of, runs_of
from zerodrift.records.recorded import RecordedRollout

_STEP = re.compile(r"step_?(\d+)")

VERL: Mapping[str, str] = {
    "prompts": "prompt_ids",
    "responses": "completion_ids",
    "rollout_log_probs": "logprobs",
    "old_log_probs": "trainer_logprobs",
}
TRL: Mapping[str, str] = {
    "sampling_per_token_logps": "logprobs",
    "old_per_token_logps": "trainer_logprobs",
}
TEXTS: Mapping[frozenset[str], str] = {
    frozenset({"input", "output", "score", "gts"}): "verl's rollout_data_dir",
    frozenset({"prompt", "completion", "advantage"}): "TRL's table of completions",
    frozenset({"content", "generation_logprobs", "rewards"}): "NeMo-RL before it wrote token_ids",
}


def renamed(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """The line under the names of a plain one."""
    return {names.get(name, name): value for name, value in fields.items()}


def refuse_text(fields: Fields) -> None:
    """Raise where a line is known to hold text alone."""
    for keys, writer in TEXTS.items():
        if keys <= fields.keys():
            raise RecordError(
                f"this is {writer}: text, without token ids; write prompt_token_ids, token_ids and logprobs of the same "
                "rollouts as JSON lines"
            )


def read_nemo_rl(fields: Fields, place: LinePlace) -> list[RecordedRollout]:
    """One rollout for each run of sampled tokens of each row."""
    columns = {
        name: _rows(fields, name)
        for name in ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
        if is_given(fields, name)
    }
    missing = {"token_ids", "token_loss_mask", "generation_logprobs"} - columns.keys()
    if missing:
        raise RecordError(
            f"the line has no {' and no '.join(sorted(missing))}; later versions of NeMo-RL write it"
        )
    rows = len(columns["token_ids"])
    lengths = listed(fields, "input_lengths") if is_given(fields, "input_lengths") else (None,) * rows
    if any(len(values) != rows for values in (*columns.values(), lengths)):
        raise InvalidCompletion("columns of the line have different numbers of rows")
    step = _STEP.search(place.source)
    number = int(step[1]) if step else None
    return [
        rollout
        for row in range(rows)
        for rollout in _sequence(
            {name: values[row][: lengths[row]] for name, values in columns.items()}, place, number
        )
    ]


def _sequence(
    columns: Mapping[str, tuple[Any, ...]], place: LinePlace, step: int | None
) -> list[RecordedRollout]:
    ids = columns["token_ids"]
    for name, values in columns.items():
        if len(values) != len(ids):
            raise InvalidCompletion(f"{len(ids)} token_ids carry {len(values)} {name}; each needs one")
    rollouts = []
    for begin, end in runs_of([bool(mask) for mask in columns["token_loss_mask"]]):
        engine = numbers_of(columns["generation_logprobs"][begin:end])
        trainer = columns["prev_logprobs"][begin:end] if "prev_logprobs" in columns else None
        rollouts.append(
            RecordedRollout(
                source=place.source,
                line=place.line,
                step=step,
                prompt=ids[:begin],
                output=ids[begin:end],
                logprobs=engine.values,
                sign_turned=engine.sign_turned,
                trainer_logprobs=trainer,
                sampling=place.default,
                stated=place.given,
            )
        )
    return rollouts


def _rows(fields: Fields, name: str) -> tuple[tuple[Any, ...], ...]:
    """A column of rows; one that stands without a batch around it is a row."""
    values = listed(fields, name)
    if values and all(isinstance(each, list) for each in values):
        return tuple(tuple(each) for each in values)
    return (values,)
