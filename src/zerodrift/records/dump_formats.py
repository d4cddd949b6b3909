"""Formats that rollouts are recorded in, each as one function from a decoded line to recorded rollouts.

    zerodrift   rollouts.jsonl of one of our own runs
    plain       one object per line: prompt_token_ids, token_ids, logprobs, and what else is known
    prime-rl    token_exports/step_N/rank_M.jsonl of prime-rl, schema 1: one object per packed sequence, with aligned
                lists over prompt and output
    nemo-rl, verl, trl   see `dump_foreign`

A reader states what the line says and nothing else; it never looks at another line.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.errors import InvalidCompletion, InvalidValue, NonFinite
from zerodrift.core.request import SHAPING
from zerodrift.records.dump_fields import (
    Fields,
    LinePlace,
    finish_reason_of,
    is_given,
    kind_of,
    label_of,
    listed,
    messages_of,
    numbers_of,
    prompt_text_of,
    runs_of,
    sampling_of,
    stated_parameters,
    text_of,
)
from zerodrift.records.dump_foreign import TRL, VERL, read_nemo_rl, renamed
from zerodrift.records.dump_masks import Part, sampled_parts
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.rollout import Rollout


class DumpFormat(StrEnum):
    """How a dump is written."""

    ZERODRIFT = "zerodrift"
    PLAIN = "plain"
    PRIME_RL = "prime-rl"
    NEMO_RL = "nemo-rl"
    VERL = "verl"
    TRL = "trl"
    ARCHIVE = "archive"
    """A directory, read by batch and not by line: see `dump_archive`."""


Reader = Callable[[Fields, LinePlace], list[RecordedRollout]]

PROMPT_KEYS = ("prompt_token_ids", "prompt_ids")
OUTPUT_KEYS = ("token_ids", "completion_ids")
TRAINER_KEYS = ("trainer_logprobs", "old_logprobs", "old_log_probs", "old_per_token_logps", "prev_logprobs")
"""The trainer's numbers, under our name, the monitor's, and those of verl, TRL and NeMo-RL."""
PRIME_RL_SCHEMA = 1


FIELDS: Mapping[DumpFormat, frozenset[str]] = {
    DumpFormat.ZERODRIFT: frozenset({"index", "group", "request"}),
    DumpFormat.PRIME_RL: frozenset({"token_ids", "loss_mask", "inference_logprobs"}),
    DumpFormat.NEMO_RL: frozenset({"token_ids", "generation_logprobs"}),
    DumpFormat.VERL: frozenset({"prompts", "responses", "rollout_log_probs"}),
    DumpFormat.TRL: frozenset({"prompt_ids", "completion_ids", "sampling_per_token_logps"}),
}
"""By which each is known."""


def detect(fields: Fields) -> DumpFormat | None:
    """The format that has these keys; None where none has."""
    keys = fields.keys()
    known = (form for form, needed in FIELDS.items() if needed <= keys)
    plain = "logprobs" in keys and keys & set(PROMPT_KEYS) and keys & set(OUTPUT_KEYS)
    return next(known, DumpFormat.PLAIN if plain else None)


def read_own(fields: Fields, place: LinePlace) -> list[RecordedRollout]:
    """A line of `rollouts.jsonl`; one without a completion says why, and is refused for that reason."""
    rollout = msgspec.convert(fields, Rollout, str_keys=True)
    completion = rollout.completion
    if completion is None:
        assert rollout.problem is not None, "a rollout is a completion or a problem"
        error = NonFinite if rollout.problem.code == NonFinite.code else InvalidCompletion
        raise error(f"the engine gave no usable answer: {rollout.problem.message}")
    versions = dict.fromkeys(span.version.label for span in completion.versions)
    return [
        RecordedRollout(
            source=place.source,
            line=place.line,
            # As it was sent: this is what a trainer scores. What the engine made of it is for attribution to find.
            prompt=rollout.request.prompt.token_ids,
            output=completion.token_ids,
            logprobs=completion.logprobs,
            kind=completion.kind,
            sampling=rollout.request.sampling,
            stated=frozenset(SHAPING),
            version="+".join(versions) or None,
            finish_reason=completion.finish_reason,
        )
    ]


def read_plain(fields: Fields, place: LinePlace) -> list[RecordedRollout]:
    """The least that can be judged is prompt ids, output ids and logprobs; a mask says which of these are padding."""
    output = listed(fields, *OUTPUT_KEYS)
    parts = sampled_parts(fields, listed(fields, *PROMPT_KEYS), output)
    return [_plain(fields, place, output, part, parts) for part in parts]


def _plain(
    fields: Fields, place: LinePlace, output: tuple[int, ...], part: Part, parts: list[Part]
) -> RecordedRollout:
    stated = stated_parameters(fields)
    engine = numbers_of(part.of(listed(fields, "logprobs"), "logprobs", len(output), parts))
    trainer = None
    if names := [name for name in TRAINER_KEYS if is_given(fields, name)]:
        beside = part.of(listed(fields, *names), names[0], len(output), parts)
        # Of one writer and of one sign; where only the trainer's are above zero, they are refused.
        trainer = numbers_of(beside).values if engine.sign_turned else beside
    return RecordedRollout(
        source=place.source,
        line=place.line,
        step=fields.get("step"),
        prompt=part.prompt,
        output=output[part.begin : part.end],
        logprobs=engine.values,
        sign_turned=engine.sign_turned,
        kind=kind_of(fields),
        sampling=sampling_of(place.default, stated),
        stated=frozenset({*place.given, *stated}),
        trainer_logprobs=trainer,
        version=label_of(fields),
        model=text_of(fields, "model"),
        text=prompt_text_of(fields),
        messages=messages_of(fields),
        finish_reason=finish_reason_of(fields),
    )


def read_prime_rl(fields: Fields, place: LinePlace) -> list[RecordedRollout]:
    """One rollout for each run of sampled tokens: turns, with tool output between them, were sampled one by one.

    Schema 1 has no temperature: trainer and engine both divided by it, and the caller must say which it was. Numbers
    that were not finite were written as null.
    """
    if fields.get("schema_version") != PRIME_RL_SCHEMA:
        raise InvalidValue(
            f"schema_version is {fields.get('schema_version')!r}, and this reader knows {PRIME_RL_SCHEMA}; "
            "convert the dump to plain lines"
        )
    ids, engine = listed(fields, "token_ids"), listed(fields, "inference_logprobs")
    trainer = listed(fields, "trainer_logprobs")
    sampled = _sampled(fields, len(ids))
    for name, values in (("inference_logprobs", engine), ("trainer_logprobs", trainer)):
        if len(values) != len(ids):
            raise InvalidCompletion(f"{len(ids)} token_ids carry {len(values)} {name}; each needs one")
    rollouts = []
    for begin, end in runs_of(sampled):
        for name, values in (("inference_logprobs", engine), ("trainer_logprobs", trainer)):
            if None in values[begin:end]:
                raise NonFinite(f"{name} hold null, which prime-rl writes for NaN and infinities")
        rollouts.append(
            RecordedRollout(
                source=place.source,
                line=place.line,
                step=fields.get("step"),
                prompt=ids[:begin],
                output=ids[begin:end],
                logprobs=engine[begin:end],
                trainer_logprobs=trainer[begin:end],
                sampling=place.default,
                stated=place.given,
            )
        )
    return rollouts


READERS: Mapping[DumpFormat, Reader] = {
    DumpFormat.ZERODRIFT: read_own,
    DumpFormat.PLAIN: read_plain,
    DumpFormat.PRIME_RL: read_prime_rl,
    DumpFormat.NEMO_RL: read_nemo_rl,
    DumpFormat.VERL: lambda fields, place: read_plain(renamed(fields, VERL), place),
    DumpFormat.TRL: lambda fields, place: read_plain(renamed(fields, TRL), place),
}


def _sampled(fields: Fields, length: int) -> list[bool]:
    """Tokens in the loss that the policy itself sampled: those of a frozen model carry no behaviour logprob."""
    columns = {
        name: listed(fields, name) if is_given(fields, name) else (None,) * length
        for name in ("loss_mask", "rl_weights", "ref_kl_weights")
    }
    for name, values in columns.items():
        if len(values) != length:
            raise InvalidCompletion(f"{length} token_ids carry {len(values)} {name}; each needs one")
    return [
        bool(mask) and not (policy == 0 and not distilled)
        for mask, policy, distilled in zip(*columns.values(), strict=True)
    ]
