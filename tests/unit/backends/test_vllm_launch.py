import msgspec
import pytest

from zerodrift.backends.vllm_launch import SWITCHES, VALUES, flags
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError


def test_what_is_not_set_is_left_to_the_engine():
    nothing = EngineConfig(enable_prefix_caching=None, async_scheduling=None)
    assert flags(nothing, "auto") == [
        "--enable-prompt-tokens-details",
        *("--dtype", "auto"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--kv-cache-dtype", "auto"),
        *("--tensor-parallel-size", "1"),
        "--no-enforce-eager",
    ]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_model_len", 512, ["--max-model-len", "512"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("logprobs_mode", "raw_logprobs", ["--logprobs-mode", "raw_logprobs"]),
        ("kv_cache_dtype", "fp8", ["--kv-cache-dtype", "fp8"]),
        ("head_dtype", "float32", ["--hf-overrides", '{"head_dtype": "float32"}']),
        ("enable_chunked_prefill", True, ["--enable-chunked-prefill"]),
        ("enable_chunked_prefill", False, ["--no-enable-chunked-prefill"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("async_scheduling", False, ["--no-async-scheduling"]),
        ("enforce_eager", True, ["--enforce-eager"]),
    ],
)
def test_every_setting_becomes_its_flag(field, value, expected):
    arguments = flags(msgspec.structs.replace(EngineConfig(), **{field: value}), "float32")
    start = arguments.index(expected[0])
    assert arguments[start : start + len(expected)] == expected
    assert arguments.count(expected[0]) == 1


def test_own_arguments_come_last_and_win():
    arguments = flags(EngineConfig(args=("--dtype", "half", "--seed", "1")), "float32")
    assert arguments[-4:] == ["--dtype", "half", "--seed", "1"]


OVERRIDES = [
    ("--hf-overrides", '{"rope_theta": 1}'),
    ('--hf-overrides={"rope_theta": 1}',),
    ("--hf_overrides", '{"head_dtype": "float32"}'),
    ("--hf-overrides.rope_theta", "1"),
    ("--hf_overrides.rope_theta=1",),
    ("--hf-over", '{"rope_theta": 1}'),  # argparse takes what begins like one flag only
]


@pytest.mark.parametrize("own", OVERRIDES)
def test_of_two_overrides_neither_is_lost_in_silence(own):
    with pytest.raises(ConfigError, match=rf"{own[0][:10]}.*engine\.head_dtype to auto"):
        flags(EngineConfig(head_dtype="float32", args=("--seed", "1", *own)), "float32")
    assert flags(EngineConfig(args=own), "float32")[-len(own) :] == list(own)


def test_other_flags_of_hugging_face_are_no_overrides():
    arguments = flags(EngineConfig(head_dtype="float32", args=("--hf-config-path", "x")), "float32")
    assert "--hf-overrides" in arguments


def test_every_field_that_is_named_exists():
    assert {*VALUES, *SWITCHES} <= set(EngineConfig.__struct_fields__)
    # Settings of the engine that no flag carries: how it is reached or started, and what the audit does with it.
    reached = {"name", "url", "served_model", "api_key_env", "python", "args", "env"}
    patience = {"startup_timeout_s", "request_timeout_s", "concurrency"}
    others = {*reached, *patience, "head_dtype", "route"}
    assert set(EngineConfig.__struct_fields__) - {*VALUES, *SWITCHES} == others
