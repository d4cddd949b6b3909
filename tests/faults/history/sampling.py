"""Bugs in which distribution tokens are drawn from, and where they end."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from history.bug import reenacted
from history.twin import Twin
from zerodrift import models
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request, SamplingParams


class OwnDefaults(Twin):
    """What a request does not state comes from elsewhere; what comes back says what was requested."""

    def __init__(self, engine: Any, **defaults: float) -> None:
        super().__init__(engine)
        self._defaults = defaults

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        sent = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, **self._defaults))
            for each in requests
        ]
        answers = super().generate(sent)
        return [
            msgspec.structs.replace(
                answer, completions=tuple(_as_asked(each, request.sampling) for each in answer.completions)
            )
            for request, answer in zip(requests, answers, strict=True)
        ]


def _as_asked(completion: Any, asked: SamplingParams) -> Any:
    stated = msgspec.structs.replace(asked, seed=completion.sampling.seed)
    return msgspec.structs.replace(completion, sampling=stated)


def _from_generation_config(engine: Any) -> Twin:
    """The client states temperature, top-p and top-k in every request; of the penalty it has never heard."""
    file = Path(engine.spec) / "generation_config.json"
    return OwnDefaults(engine, repetition_penalty=json.loads(file.read_text())["repetition_penalty"])


def _with_generation_config(spec: str, where: Path, **settings: Any) -> Path:
    directory = models.materialise(spec, where)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


def _as_qwen_ships_it(spec: str, where: Path) -> Path:
    shipped = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    return _with_generation_config(spec, where, do_sample=True, **shipped)


class SameSeedEverywhere(Twin):
    """The samples of a prompt are spread over replicas, and all replicas start from one seed."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        single = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, n=1))
            for each in requests
        ]
        most = max(each.sampling.n for each in requests)
        replicas = [super(SameSeedEverywhere, self).generate(single) for _ in range(most)]
        gathered = []
        for place, request in enumerate(requests):
            samples = [
                msgspec.structs.replace(
                    _as_asked(replicas[number][place].completions[0], request.sampling), sample_index=number
                )
                for number in range(request.sampling.n)
            ]
            gathered.append(Answer(tuple(samples)))
        return gathered


END_OF_TURN = 202
"""A newline, which the models say now and then: the second of two ends of sequence."""


def _ends_with_a_turn(spec: str, where: Path) -> Path:
    return _with_generation_config(spec, where, eos_token_id=[1, END_OF_TURN])


class FirstEndOnly(Twin):
    """Merging rebuilt generation_config.json from config.json, which knows of one end."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        known = tuple(token for token in self.reference.facts.eos_token_ids if token != END_OF_TURN)
        self.reference.facts = msgspec.structs.replace(self.reference.facts, eos_token_ids=known)


SAMPLING = (
    reenacted("trl#6789", lambda engine: OwnDefaults(engine, top_p=0.95)),
    reenacted("prime-rl#886", _from_generation_config, checkpoint=_as_qwen_ships_it),
    reenacted("verl#5179", SameSeedEverywhere),
    reenacted("EasyR1#11007", FirstEndOnly, checkpoint=_ends_with_a_turn),
)
