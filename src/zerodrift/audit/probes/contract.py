"""Did the engine do what was asked, before any number is compared?

Cheap checks on what came back: the prompt it saw, values it could not give, samples that should differ. A fault
found here is exact: no statistics are involved.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set

import msgspec

from zerodrift.audit.probes.result import ProbeResult, answered, found, vacuous
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.core.completion import Completion, FinishReason, Problem
from zerodrift.core.errors import BadAnswer, ForeignTokens, NonFinite
from zerodrift.models.model_facts import ModelFacts
from zerodrift.records.evidence import ContractEvidence
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, Probe

NAME = Probe.CONTRACT
PROBLEM_CAUSES = {NonFinite.code: "semantic/nonfinite", ForeignTokens.code: "weights/other-model"}
Decode = Callable[[Sequence[int]], str]
EOS = "semantic/eos"
LEAST_FOREIGN = 0.5
"""Share of samples with ids that the model does not have. A row of padding is drawn once in a while; another model's
vocabulary shows in nearly all."""


def readable(rollout: Rollout, vocab_size: int) -> Rollout:
    """The rollout, or a problem in its place where it holds ids that the model does not have: nothing can score it."""
    completion = rollout.completion
    if completion is None or (largest := max(completion.sequence)) < vocab_size:
        return rollout
    message = f"token id {largest} came back, but the model has {vocab_size} tokens"
    sampled = max(completion.token_ids, default=0) >= vocab_size
    code = ForeignTokens.code if sampled else BadAnswer.code
    return msgspec.structs.replace(rollout, completion=None, problem=Problem(code, message))


def contract(
    rollouts: Sequence[Rollout],
    engine: str,
    facts: ModelFacts,
    sources: str = "",
    decode: Decode | None = None,
) -> ProbeResult:
    """Judge every rollout of the plan, those without a completion included; `sources` is where prompts came from, and
    `decode` tells whether two lists of ids are one text."""
    bos = facts.bos_token_id
    completed = [rollout for rollout in rollouts if rollout.completion is not None]
    problems = [rollout.problem for rollout in rollouts if rollout.problem is not None]
    causes = [
        *_problems(rollouts, engine),
        *_prompts(completed, engine, bos, decode),
        *_seeds(completed, engine),
    ]
    causes += _stops(completed, engine, facts.eos_token_ids)
    ended = sum(
        rollout.completion is not None and rollout.completion.finish_reason is FinishReason.STOP
        for rollout in completed
    )
    evidence = ContractEvidence(completions=len(completed), unreadable=len(problems), ended=ended)
    if causes:
        message = causes[0].evidence
        return answered(NAME, Outcome.FAIL, message, evidence, required=True, causes=tuple(causes))
    if problems:
        message = f"{len(problems)} of {len(rollouts)} samples could not be read: {problems[0].message}"
        return answered(NAME, Outcome.INCONCLUSIVE, message, evidence, required=True)
    if broken := [each for each in completed if _broken_off(each)]:
        message = f"{len(broken)} of {len(rollouts)} outputs were broken off by the engine: it had more to say, or could not"
        return answered(NAME, Outcome.INCONCLUSIVE, message, evidence, required=True)
    if not completed:
        return vacuous(NAME, "no completion came back", evidence, required=True)
    return answered(
        NAME,
        Outcome.PASS,
        f"{len(completed)} completions{f' of {sources}' if sources else ''}: prompts as sent, logprobs finite, {_distinct(completed)}, {_ends(ended)}",
        evidence,
        required=True,
    )


def _distinct(rollouts: Sequence[Rollout]) -> str:
    """What is known of samples that share a prompt."""
    several = {rollout.index for rollout in rollouts if rollout.request.sampling.n > 1}
    return f"samples distinct in {len(several)} requests" if several else "one sample of each"


def _ends(ended: int) -> str:
    """How an end is reported is seen only where there is one."""
    return (
        f"{ended} ended before the limit"
        if ended
        else "none ended before the limit: how an end is told was not seen"
    )


def _problems(rollouts: Sequence[Rollout], engine: str) -> list[CauseFound]:
    codes = Counter(rollout.problem.code for rollout in rollouts if rollout.problem is not None)
    causes = []
    for code, count in codes.items():
        if code in PROBLEM_CAUSES:
            first = next(
                r.problem.message for r in rollouts if r.problem is not None and r.problem.code == code
            )
            share = count / len(rollouts)
            if code == ForeignTokens.code and share < LEAST_FOREIGN:
                continue
            message = f"{count} of {len(rollouts)} samples carry no usable logprob: {first}"
            causes.append(found(PROBLEM_CAUSES[code], engine, NAME, message, explained=share))
    return causes


def _prompts(
    rollouts: Sequence[Rollout], engine: str, bos: int | None, decode: Decode | None
) -> list[CauseFound]:
    """Prompts that the engine saw differently, classified by how most of them were changed."""
    changed = [(r.request.prompt.token_ids, _seen(r)) for r in rollouts]
    changed = [(sent, seen) for sent, seen in changed if seen != sent]
    if not changed:
        return []
    others = {rollout.request.prompt.token_ids for rollout in rollouts}
    kinds = [_classify_prompt(sent, seen, bos, others, decode) for sent, seen in changed]
    (cause, how), _ = Counter(kinds).most_common(1)[0]
    sent, seen = changed[kinds.index((cause, how))]
    ends = {
        len(seen) - len(sent) for (sent, seen), kind in zip(changed, kinds, strict=True) if kind[1] == how
    }
    if cause == "semantic/template" and len(ends) > 1:
        # A template ends every prompt alike. What cuts each by a number of its own is a limit, or something else.
        cause = UNEXPLAINED
    share = len(changed) / len(rollouts)
    message = f"the engine saw {how} in {len(changed)} of {len(rollouts)} prompts: sent {len(sent)} ids, saw {len(seen)}"
    return [found(cause, engine, NAME, message, explained=share)]


def _classify_prompt(
    sent: tuple[int, ...],
    seen: tuple[int, ...],
    bos: int | None,
    others: Set[tuple[int, ...]],
    decode: Decode | None,
) -> tuple[str, str]:
    if bos is not None and seen == (bos, *sent):
        return "semantic/bos", "one BOS more than was sent"
    if bos is not None and sent == (bos, *seen):
        return "semantic/bos", "one BOS fewer than was sent"
    if seen == sent[: len(seen)] or sent == seen[: len(sent)]:
        return "semantic/template", "another end of the prompt"
    if seen in others:
        return "semantic/misbound-output", "another request's prompt"
    if decode is not None and decode(sent) == decode(seen):
        return "semantic/retokenised", "other token ids for the same text"
    # Lost, cut or exchanged ids are another text, and no encoding makes that of it.
    return UNEXPLAINED, "other token ids, of another text,"


def _seeds(rollouts: Sequence[Rollout], engine: str) -> list[CauseFound]:
    """Samples of one request that repeat each other although the request drew more than one."""
    groups: dict[int, list[Completion]] = {}
    for rollout in rollouts:
        if rollout.completion is not None and rollout.request.sampling.n > 1:
            groups.setdefault(rollout.index, []).append(rollout.completion)
    groups = {index: group for index, group in groups.items() if len(group) > 1}
    if not groups:
        return []
    equal = [
        group
        for group in groups.values()
        if len({completion.token_ids for completion in group}) == 1
        # A short or certain output may repeat by chance: demand a joint surprise of 20 nats.
        and -sum(group[0].logprobs) * (len(group) - 1) > 20
    ]
    if not equal:
        return []
    message = f"all samples of {len(equal)} of {len(groups)} requests are equal, token for token"
    return [found("semantic/seed", engine, NAME, message, explained=len(equal) / len(groups))]


def _stops(rollouts: Sequence[Rollout], engine: str, eos_ids: Sequence[int]) -> list[CauseFound]:
    """Outputs whose end is not the end they claim."""
    causes = []
    for cause, message, wrong in (
        # Whatever loses or adds tokens makes a wrong length, and shortens outputs that end by a stop as well.
        (UNEXPLAINED, "have another length than their finish reason says", _wrong_length),
        (EOS, "ended by a stop but hold no stop token: it was dropped, and its logprob with it", _lost_stop),
        (EOS, "go on after a stop token", _overran_stop),
    ):
        count = sum(wrong(rollout, eos_ids) for rollout in rollouts)
        if count:
            share = count / len(rollouts)
            causes.append(found(cause, engine, NAME, f"{count} outputs {message}", explained=share))
    return causes


def _broken_off(rollout: Rollout) -> bool:
    assert rollout.completion is not None, "only completed rollouts are asked"
    return rollout.completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)


def _lost_stop(rollout: Rollout, eos_ids: Sequence[int]) -> bool:
    completion, params = rollout.completion, rollout.request.sampling
    assert completion is not None, "only completed rollouts are asked"
    if completion.finish_reason is not FinishReason.STOP or params.stop:
        return False
    return not completion.token_ids or completion.token_ids[-1] not in {*eos_ids, *params.stop_token_ids}


def _overran_stop(rollout: Rollout, eos_ids: Sequence[int]) -> bool:
    completion, params = rollout.completion, rollout.request.sampling
    assert completion is not None, "only completed rollouts are asked"
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    return any(token in stops for token in completion.token_ids[params.min_tokens : -1])


def _wrong_length(rollout: Rollout, eos_ids: Sequence[int]) -> bool:
    completion, limit = rollout.completion, rollout.request.sampling.max_tokens
    assert completion is not None, "only completed rollouts are asked"
    short = completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) != limit
    return short or len(completion.token_ids) > limit


def _seen(rollout: Rollout) -> tuple[int, ...]:
    assert rollout.completion is not None, "only completed rollouts are asked"
    return rollout.completion.prompt_token_ids
