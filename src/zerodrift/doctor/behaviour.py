"""Five short completions tell what the numbers of a server mean, whatever it shows of its configuration.

Under raw logprobs the distance between two tokens is the same at every temperature; under processed ones it is twice
as large at 0.5 as at 1. And a request that says nothing about sampling is answered like one that says everything
neutrally, unless the server fills something in. Penalties need a token to be repeated: where only two tokens are
allowed, one of the prompt and one that is not, the second output is penalised whichever was drawn first.
"""

from collections.abc import Mapping

import msgspec

from zerodrift.backends.http import HttpClient
from zerodrift.backends.json_path import look_up
from zerodrift.core.errors import EngineError
from zerodrift.doctor.checkpoint import NEUTRAL
from zerodrift.doctor.setting import Origin, Setting, Settings

COMPLETIONS = "/v1/completions"
SAID = {name: values[0] for name, values in NEUTRAL.items()}
"""A request that leaves nothing for the server to fill in."""
PROMPT = [5, 6, 7, 8]
TWO = {"allowed_token_ids": [5, 9], "max_tokens": 2, "logprobs": 2, "ignore_eos": True}
"""The first is in the prompt, and either may be drawn twice. More alternatives would be excluded ones."""
TOP = 5
"""Alternatives to ask for; vLLM gives up to 20 unless told otherwise."""
FAR = 0.02
"""Nats that two tokens must be apart to tell a factor of 2 from bf16 rounding of the same logits, which is none:
all requests see the same prompt. A decoded token may share its step with those of others, and be rounded otherwise."""
SAME = 1e-3
NEVER = -9998.0
"""vLLM writes -9999 for a token that truncation excluded."""

Logprobs = Mapping[str, float]


class Drawn(msgspec.Struct):
    """Sampled tokens, each with its alternatives."""

    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class Behaviour:
    """What one model of one server does."""

    def __init__(self, http: HttpClient, model: str) -> None:
        self._http = http
        self._model = model

    def settings(self, shown: Settings) -> dict[str, Setting]:
        """What could be measured; it replaces what was only shown where the two disagree or nothing was shown."""
        cold = self._ask({**SAID, "temperature": 0.5})
        plain = self._ask(SAID)
        silent = self._ask({})
        found: dict[str, Setting] = {}
        mode = None if cold is None or plain is None else logprobs_mode(cold, plain)
        if mode is not None and shown["logprobs_mode"].value != mode:
            found["logprobs_mode"] = Setting("logprobs_mode", mode, Origin.MEASURED)
        filled = None if plain is None or silent is None else differ(plain, silent)
        if filled is False and mode == "processed_logprobs":
            # Raw logprobs would look alike whatever the server fills in.
            explicit, left_out = self._draw({**TWO, **SAID}), self._draw(TWO)
            filled = None if explicit is None or left_out is None else penalised(explicit, left_out)
        elif not filled:
            filled = None
        if filled is not None:
            value = "applied" if filled else None
            found["generation_defaults"] = Setting("generation_defaults", value, Origin.MEASURED)
        return found

    def _ask(self, sampling: Mapping[str, float]) -> Logprobs | None:
        drawn = self._draw({"max_tokens": 1, "logprobs": TOP, **sampling})
        return drawn.top_logprobs[0] if drawn and drawn.top_logprobs else None

    def _draw(self, request: Mapping[str, object]) -> Drawn | None:
        body = {"model": self._model, "prompt": PROMPT, "seed": 0, "return_tokens_as_token_ids": True}
        try:
            answer = self._http.post(COMPLETIONS, {**body, **request})
            return msgspec.convert(look_up(answer, "choices/0/logprobs"), Drawn)
        except (EngineError, msgspec.ValidationError):
            return None  # a server that refuses, or answers otherwise, leaves it unknown


def logprobs_mode(cold: Logprobs, plain: Logprobs) -> str | None:
    """Which mode gives `cold` at temperature 0.5 and `plain` at 1; None where no two tokens can tell."""
    if any(value > SAME for value in (*cold.values(), *plain.values())):
        # No logprob is positive. Processed logits double with the temperature halved.
        token = max(plain, key=lambda each: abs(plain[each]))
        return "processed_logits" if _doubled(cold.get(token, 0.0), plain[token]) else "raw_logits"
    shared = sorted(
        (token for token in plain if token in cold and plain[token] > NEVER), key=plain.__getitem__
    )
    if len(shared) < 2:
        return None
    low, high = shared[0], shared[-1]
    near, far = plain[high] - plain[low], cold[high] - cold[low]
    if near < FAR:
        return None
    return "processed_logprobs" if _doubled(far, near) else "raw_logprobs"


def differ(explicit: Logprobs, silent: Logprobs, by: float = SAME) -> bool:
    """Whether a request that left sampling out was answered from another distribution."""
    if any(value < NEVER for value in silent.values()):
        return True
    return any(abs(explicit[token] - silent[token]) > by for token in explicit if token in silent)


def penalised(explicit: Drawn, silent: Drawn) -> bool | None:
    """Whether a token of the prompt, or the first output, is less likely where sampling was left out; None: no telling."""
    pairs = list(zip(explicit.top_logprobs, silent.top_logprobs, strict=False))
    if pairs and differ(*pairs[0]):
        return True
    if len(pairs) < 2 or explicit.tokens[:1] != silent.tokens[:1]:
        return None
    return differ(*pairs[1], by=FAR)


def _doubled(at_half: float, at_one: float) -> bool:
    return abs(at_half - 2 * at_one) < abs(at_half - at_one)
