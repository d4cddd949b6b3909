"""The engine as its users meet it: what goes in, what comes out, and what is counted on the way."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engine.support import PROMPT, Make, ended, finished, seeded

import zerodrift as zd
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import (
    EngineError,
    FingerprintMismatch,
    InvalidPrompt,
    InvalidSampling,
    InvalidValue,
    InvariantBroken,
    ModelError,
    OutOfBlocks,
    UnsupportedModel,
)
from zerodrift.core.request import Prompt, SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.output import SampleUpdate
from zerodrift.exact.fingerprint import require_same


def test_the_lines_that_every_user_tries_first() -> None:
    prompts = ["3+4=", [5, 6, 7], Prompt((8, 9))]
    engine = zd.Engine("testbed:qwen3")
    outs = engine.generate(prompts, zd.SamplingParams(temperature=0.7, max_tokens=64, seed=1, logprobs=5))
    model = zd.exact.prepare(zd.models.load("testbed:qwen3"))
    lp = zd.exact.token_logprobs(model, outs)
    assert all((a.detach() == torch.tensor(o.logprobs)).all() for a, o in zip(lp, outs, strict=True))
    assert [len(o.top_logprobs[0]) for o in outs] == [5, 5, 5]
    assert all(isinstance(o.text, str) for o in outs)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        (PROMPT, 1),
        (torch.tensor(PROMPT), 1),
        ([torch.tensor(PROMPT)] * 2, 2),
        (tuple(PROMPT), 1),
        (Prompt(tuple(PROMPT)), 1),
        ([PROMPT, PROMPT], 2),
        ([], 0),
    ],
)
def test_one_prompt_or_many(engine: Engine, prompts: Any, count: int) -> None:
    outputs = engine.generate(prompts, seeded())
    assert [output.prompt_token_ids for output in outputs] == [tuple(PROMPT)] * count


def test_one_set_of_parameters_or_one_each(engine: Engine) -> None:
    outputs = engine.generate([PROMPT, PROMPT], [seeded(max_tokens=1), seeded(max_tokens=2)])
    assert [len(output.token_ids) for output in outputs] == [1, 2]
    assert len(engine.generate(PROMPT)[0].token_ids) <= 16
    with pytest.raises(InvalidSampling, match="2 prompts came with 1 sampling parameters"):
        engine.generate([PROMPT, PROMPT], [seeded()])
    with pytest.raises(InvalidPrompt, match="1 prompts came with 2 lists of forced tokens"):
        engine.generate([PROMPT], seeded(), forced=[[1], [2]])


def test_prompts_as_vllm_takes_them(with_text: Engine) -> None:
    (plain,) = with_text.generate("3+4=", seeded())
    ids = list(plain.prompt_token_ids)
    for prompt in ({"prompt": "3+4="}, {"prompt_token_ids": ids}, {"prompt": "3+4=", "cache_salt": "\ud800"}):
        (found,) = with_text.generate(prompt, seeded())
        assert found.token_ids == plain.token_ids
    assert len(with_text.generate([{"prompt": "3+4="}, ids], seeded())) == 2


@pytest.mark.parametrize(
    "prompts",
    [
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": None},
        b"abc",
        {1, 2},
        (each for each in ["a"]),
        torch.ones(2, 3, dtype=torch.long),
        torch.tensor(3),
        None,
        [3.5],
        [[1], None],
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_what_would_be_guessed_at_is_refused(engine: Engine, with_text: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidPrompt):
        with_text.generate(prompts)
    with pytest.raises(InvalidPrompt):
        engine.generate("text without a tokenizer")


def test_text_that_no_tokenizer_reads_is_refused_by_itself(with_text: Engine) -> None:
    fine, wrong = with_text.generate(["3+4=", "\ud800 x"], seeded(), on_error="return")
    assert fine.problem is None
    assert wrong.problem is not None
    assert "the tokenizer cannot read" in wrong.problem.message


@pytest.mark.parametrize("params", [{"temperature": 0.7}, [{"temperature": 0.7}], "hot"])
def test_what_is_no_sampling_raises(engine: Engine, params: Any) -> None:
    with pytest.raises(InvalidSampling, match=r"give zerodrift.SamplingParams"):
        engine.generate([PROMPT], params)


def test_an_all_but_impossible_token_is_its_requests_own_problem(engine: Engine) -> None:
    cold = seeded(temperature=0.01, logit_bias={7: -100.0}, logprobs=engine.facts.vocab_size)
    alone = engine.generate(PROMPT, seeded())
    hopeless, rare, fine = engine.generate(
        [PROMPT] * 3, [cold, cold, seeded()], forced=[[7], [], []], on_error="return"
    )
    assert hopeless.finish_reason is FinishReason.ERROR
    assert rare.problem is None
    assert min(each.logprob for each in rare.top_logprobs[0]) < -9999
    assert (fine.token_ids, fine.logprobs) == (alone[0].token_ids, alone[0].logprobs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", "16"),
        ("max_num_seqs", 0),
        ("max_model_len", 1),
        ("max_model_len", 10**7),
        ("kv_cache_memory_bytes", "1GiB"),
        ("enable_prefix_caching", "no"),
        ("logprobs_mode", "raw"),
        ("version", 3),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        Engine("testbed:llama", **{name: value})
    assert name in str(refused.value)


def test_an_output_fits_a_screen(engine: Engine) -> None:
    (output,) = engine.generate([PROMPT], seeded(max_tokens=64, ignore_eos=True, logprobs=5))
    assert len(repr(output)) < 500
    assert f"token_ids=({output.token_ids[0]}, " in repr(output)


def test_few_tokens_per_step_mean_few_sequences() -> None:
    assert Engine("testbed:llama", max_num_batched_tokens=64).scheduler.limits.max_num_seqs == 64


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidValue, match="give a directory"):
        Engine(model)
    with pytest.raises(UnsupportedModel, match="cannot be prepared"):
        zd.exact.prepare(model)


@pytest.mark.parametrize("state", [[], {"a": None}, {"a": torch.empty(1, device="meta")}])
def test_what_are_no_weights_is_refused(engine: Engine, state: Any) -> None:
    with pytest.raises(ModelError, match="the new"):
        engine.swap_weights(state, "next")


def test_ids_of_a_users_own_are_stepped_over(engine: Engine) -> None:
    theirs = [engine.add_request([1, 2], seeded(), request_id=f"request-{number}") for number in (1, 2, 4)]
    ours = [engine.add_request([number, 7], seeded()) for number in (5, 6)]
    assert ours == ["request-3", "request-5"]
    assert {update.request_id for update in engine.step()} == {*theirs, *ours}


def test_samples_come_in_order_and_differ(engine: Engine) -> None:
    outputs = engine.generate([PROMPT, [1, 2]], [seeded(n=3), seeded()])
    assert [(output.prompt_token_ids[0], output.sample_index) for output in outputs] == [
        (5, 0),
        (5, 1),
        (5, 2),
        (1, 0),
    ]
    assert len({output.token_ids for output in outputs[:3]}) == 3
    alone = engine.generate(PROMPT, seeded())[0]
    assert (alone.token_ids, alone.logprobs) == (outputs[0].token_ids, outputs[0].logprobs)


def test_every_token_is_forwarded_once_and_its_logprob_comes_from_that_forward(engine_of: Make) -> None:
    """A second pass for logprobs would be seen in the count."""
    engine = engine_of(enable_prefix_caching=False)
    outputs = engine.generate([PROMPT, PROMPT, [1, 2]], seeded())
    # The last token is drawn and never forwarded.
    expected = sum(len(output.sequence) - 1 for output in outputs)
    assert engine.runner.forwarded_tokens == expected == engine.metrics().forwarded_tokens


def test_equal_prompts_cost_one_prefill_and_a_block_each(engine_of: Make) -> None:
    engine = engine_of(block_size=4, max_num_batched_tokens=256)
    prompt = [5 + number % 50 for number in range(40)]
    engine.generate([prompt] * 8, seeded(max_tokens=1))
    assert engine.runner.forwarded_tokens == 40 + 7 * 4
    assert engine.metrics().prefix_hit_rate == pytest.approx(7 * 36 / (8 * 40))


def test_prompts_that_share_nothing_wait_for_nobody(engine_of: Make) -> None:
    engine = engine_of(max_num_batched_tokens=256)
    for first in range(4):
        engine.add_request([first, *PROMPT], seeded(max_tokens=1))
    assert len(ended(engine.step())) == 4


def test_salts_keep_tenants_apart_and_a_reset_makes_it_cold(engine: Engine) -> None:
    outputs = [
        engine.generate(Prompt(tuple(range(1, 14)), cache_salt=salt), seeded())[0]
        for salt in ("a", "b", "a", None)
    ]
    assert [output.cached_tokens for output in outputs] == [0, 0, 12, 0]
    assert len({output.logprobs for output in outputs}) == 1
    engine.reset_cache()
    assert engine.generate(list(range(1, 14)), seeded())[0].cached_tokens == 0


def test_a_completion_says_everything(engine: Engine) -> None:
    (output,) = engine.generate(
        PROMPT, SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    )
    assert output.kind is LogprobKind.PROCESSED
    assert output.sampling.seed is not None
    assert output.finish_reason is FinishReason.LENGTH
    assert [(span.version, span.start, span.end) for span in output.versions] == [(engine.version, 0, 3)]
    assert [(part.version, part.start, part.end) for part in output.lineage] == [(engine.version, 0, 8)]
    assert output.numeric == zd.exact.numeric_fingerprint(engine.model)
    assert output.fingerprint == engine.fingerprint().digest
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert [len(row) for row in output.prompt_top_logprobs] == [0, 2, 2, 2, 2, 2]
    assert output.text is None
    plain = output.completion()
    assert type(plain) is Completion
    assert plain.logprobs == output.logprobs
    again = engine.generate(PROMPT, output.sampling)[0]
    assert again.token_ids == output.token_ids


def test_a_trainer_with_other_numerics_is_told_so(engine: Engine, tiny: Any) -> None:
    (output,) = engine.generate(PROMPT, seeded())
    same = zd.exact.prepare(copy.deepcopy(tiny))
    require_same(output.numeric, zd.exact.numeric_fingerprint(same))
    other = zd.exact.prepare(copy.deepcopy(tiny), plain=frozenset({"attention"}))
    with pytest.raises(
        FingerprintMismatch, match=r"attention is blocks-.* in the engine and sdpa in the trainer"
    ):
        require_same(output.numeric, zd.exact.numeric_fingerprint(other))


def test_a_single_token_has_no_prompt_logprob(engine: Engine) -> None:
    (output,) = engine.generate([[5]], seeded(prompt_logprobs=0))
    assert output.prompt_logprobs == (None,)
    assert output.prompt_top_logprobs == ()


def test_given_tokens_are_decoded_as_if_drawn(engine: Engine) -> None:
    (free,) = engine.generate(PROMPT, seeded())
    (forced,) = engine.generate([PROMPT], seeded(seed=99), forced=[free.token_ids])
    assert (forced.token_ids, forced.logprobs) == (free.token_ids, free.logprobs)
    (half,) = engine.generate([PROMPT], seeded(), forced=[free.token_ids[:3]])
    assert (half.token_ids, half.logprobs) == (free.token_ids, free.logprobs)


def test_stop_strings_and_ids(with_text: Engine) -> None:
    (free,) = with_text.generate("3+4=", seeded(max_tokens=40))
    assert free.text is not None
    piece = free.text[8:11]
    (stopped,) = with_text.generate("3+4=", seeded(max_tokens=40, stop=(piece,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(piece)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    token = free.token_ids[5]
    (by_id,) = with_text.generate("3+4=", seeded(max_tokens=40, stop_token_ids=(token,)))
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


def test_streaming_gives_text_as_it_comes(with_text: Engine) -> None:
    (whole,) = with_text.generate("3+4=", seeded(max_tokens=20))
    pieces = list(with_text.stream("3+4=", seeded(max_tokens=20)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert len(pieces) == 20
    assert [piece.output is None for piece in pieces] == [True] * 19 + [False]


def joined(updates: list[SampleUpdate]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    assert [update.output is None for update in updates] == [True] * (len(updates) - 1) + [False]
    tokens = tuple(token for update in updates for token in update.token_ids)
    return tokens, tuple(value for update in updates for value in update.logprobs)


def test_a_step_tells_what_every_sample_got(engine: Engine) -> None:
    """Two requests at once, of which one begins later: every token is told once, in the step that made it."""
    whole = [engine.generate(prompt, seeded(n=2)) for prompt in (PROMPT, [1, 2])]
    first = engine.add_request(PROMPT, seeded(n=2))
    steps = [engine.step(), engine.step()]
    second = engine.add_request([1, 2], seeded(n=2))
    while engine.has_unfinished:
        steps.append(engine.step())
    assert [len(step) for step in steps] == [2, 2, 4, 4, 4, 4, 2, 2]
    assert all(len(update.token_ids) == len(update.logprobs) == 1 for step in steps for update in step)
    for name, outputs in zip((first, second), whole, strict=True):
        for output in outputs:
            mine = [
                update
                for step in steps
                for update in step
                if (update.request_id, update.sample_index) == (name, output.sample_index)
            ]
            assert joined(mine) == (output.token_ids, output.logprobs)
    assert engine.step() == []


def test_who_reads_alone_is_not_disturbed(engine: Engine) -> None:
    other = engine.add_request(PROMPT, seeded(max_tokens=3))
    for refused in (lambda: engine.generate([1, 2]), lambda: next(engine.stream([1, 2]))):
        with pytest.raises(EngineError, match="1 requests are in flight"):
            refused()
    engine.abort(other)
    stream = engine.stream(PROMPT, seeded())
    begun = [next(stream)]
    for call in (
        engine.step,
        lambda: engine.add_request([1]),
        lambda: engine.generate([1]),
        lambda: next(engine.stream([1])),
    ):
        with pytest.raises(EngineError, match="a stream of this engine is being read"):
            call()
    assert joined([*begun, *stream])[0] == engine.generate(PROMPT, seeded())[0].token_ids


def test_a_stream_that_is_closed_ends_its_request(engine: Engine) -> None:
    stream = engine.stream([1, 2], seeded(max_tokens=20))
    for _ in range(5):
        next(stream)
    stream.close()
    assert not engine.has_unfinished
    assert engine.metrics().blocks_held == 0
    assert engine.generate(PROMPT, seeded())


def test_text_comes_step_by_step_where_it_is_asked_for(with_text: Engine) -> None:
    streamed = with_text.add_request("3+4=", seeded(max_tokens=20), stream_text=True)
    quiet = with_text.add_request("3+4=", seeded(max_tokens=20))
    steps = []
    while with_text.has_unfinished:
        steps += with_text.step()
    texts = {
        name: "".join(update.text for update in steps if update.request_id == name)
        for name in (streamed, quiet)
    }
    whole = {output.request_id: output.text for output in ended(steps)}
    assert texts == {streamed: whole[streamed], quiet: ""}
    assert whole[quiet] == whole[streamed]


def test_an_aborted_request_keeps_what_it_has(engine: Engine) -> None:
    name = engine.add_request(PROMPT, seeded(n=2))
    for _ in range(3):
        engine.step()
    aborted = ended(engine.abort(name))
    assert [(output.finish_reason, len(output.token_ids)) for output in aborted] == [
        (FinishReason.ABORT, 3)
    ] * 2
    assert engine.metrics().blocks_held == 0


def test_metrics_while_running(engine_of: Make) -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add_request([*PROMPT, 11], seeded())
    engine.add_request([1], seeded())
    engine.step()
    now = engine.metrics()
    assert (now.running, now.waiting, now.blocks_held, now.steps) == (1, 1, 2, 1)
    assert now.fragmentation == pytest.approx(1 / 8)
    assert (now.forwarded_tokens, now.sampled_tokens) == (7, 1)
    assert now.sampled_per_second > 0
    assert 0 < now.bookkeeping_seconds < now.seconds
    assert 0 < now.mean_entropy < 4.2
    assert now.kv_bytes == 2 * 2 * 64 * 4 * 16 * 4


def test_metrics_and_fingerprint_are_values(engine: Engine) -> None:
    engine.add_request(PROMPT, seeded())
    before = engine.metrics()
    assert (before.waiting, before.steps) == (1, 0)
    engine.step()
    assert (before.waiting, before.steps) == (1, 0)
    assert (engine.metrics().waiting, engine.metrics().steps) == (0, 1)
    assert engine.metrics() is engine.metrics()
    assert engine.fingerprint() is engine.fingerprint()


def test_fragmentation_counts_every_empty_slot(engine_of: Make) -> None:
    """Against the count of all blocks, slot by slot: shared tails, full ones, those who wait with blocks."""
    engine = engine_of(max_num_seqs=4)
    for number in range(5):
        engine.add_request(
            [1, 2, 3, 4, 5 + number % 2, *range(number)], seeded(n=1 + number % 3, max_tokens=9)
        )
    size = engine.scheduler.limits.block_size
    while engine.has_unfinished:
        engine.step()
        filled: dict[int, int] = {}
        for sample in engine.scheduler.samples:
            for index, block in enumerate(sample.blocks):
                filled[block] = max(filled.get(block, 0), min(sample.computed - index * size, size))
        expected = 1 - sum(filled.values()) / (len(filled) * size) if filled else 0.0
        assert engine.metrics().fragmentation == pytest.approx(expected)


def test_more_prompts_than_the_queue_holds(engine_of: Make) -> None:
    engine = engine_of(max_waiting=2, max_num_seqs=2)
    outputs = engine.generate([[number, 3] for number in range(1, 12)], seeded(max_tokens=2))
    assert [output.prompt_token_ids[0] for output in outputs] == list(range(1, 12))


def test_the_users_model_is_left_alone(tiny: Any) -> None:
    before = tiny.config._attn_implementation
    engine = Engine(tiny, num_blocks=8)
    assert tiny.config._attn_implementation == before
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with torch.no_grad():
        first = tiny.model.layers[0].mlp.up_proj.weight
        first.add_(1)
        try:
            assert all(
                torch.equal(tensor, weights[name]) for name, tensor in engine.model.state_dict().items()
            )
        finally:
            first.sub_(1)


def test_a_directory_is_a_model(tmp_path: Path) -> None:
    zd.models.materialise("testbed:llama", tmp_path / "model")
    (one,) = Engine(tmp_path / "model", num_blocks=64).generate("3+4=", seeded())
    (other,) = Engine("testbed:llama", num_blocks=64).generate("3+4=", seeded())
    assert (one.logprobs, one.text) == (other.logprobs, other.text)


def test_a_loaded_model_keeps_its_dtype(tiny: Any) -> None:
    with pytest.raises(InvalidValue, match="the model is loaded already and has its own"):
        Engine(tiny, dtype="bfloat16")


def test_memory_is_what_was_asked_for(tiny: Any) -> None:
    block = 2 * 2 * 4 * 16 * 4
    assert Engine(tiny, block_size=4, kv_cache_memory_bytes=10 * block + 7).metrics().kv_bytes == 10 * block
    most = Engine(tiny, block_size=4, max_num_seqs=2).metrics()
    assert most.blocks_total == 2 * 96 // 4
    with pytest.raises(OutOfBlocks, match="one block of 4 tokens takes 1024 bytes"):
        Engine(tiny, block_size=4, kv_cache_memory_bytes=5)


def test_a_forward_that_fails_costs_nobody_a_bit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.generate(PROMPT, seeded(n=3))
    engine.add_request(PROMPT, seeded(n=3))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("zerodrift.engine.runner.forward_step", _fail)
        with pytest.raises(MemoryError):
            engine.step()
    outputs = finished(engine)
    assert sorted(o.logprobs for o in outputs) == sorted(o.logprobs for o in expected)


def test_generate_that_fails_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("zerodrift.engine.runner.forward_step", _fail)
        with pytest.raises(MemoryError):
            engine.generate(PROMPT)
    assert not engine.has_unfinished


def _fail(*_: Any) -> None:
    raise MemoryError


def test_books_that_contradict_themselves_stop_the_engine(engine: Engine) -> None:
    engine.scheduler.pool.allocate()
    with pytest.raises(InvariantBroken, match="but samples hold") as caught:
        engine.generate(PROMPT)
    assert caught.value.dump is not None
    assert caught.value.dump["running"] == []
    for call in (lambda: engine.generate(PROMPT), engine.step, lambda: engine.add_request(PROMPT)):
        with pytest.raises(InvariantBroken):
            call()
