"""What each section takes, what it refuses, and where two sections contradict each other."""

from typing import Any

import msgspec
import pytest

from zerodrift.config.engine import EngineConfig
from zerodrift.config.model import ModelConfig
from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.config.run import RunConfig
from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.config.validation import GateConfig, ValidationConfig
from zerodrift.core.errors import InvalidSampling, InvalidValue
from zerodrift.core.request import SamplingParams

URL, NAN, INFINITE = "http://127.0.0.1:8000", float("nan"), float("inf")
OF_ONE_REQUEST = {"logit_bias", "seed", "n", "prompt_logprobs"}
BAD: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    ModelConfig: {"path": ("",), "max_model_len": (1, True)},
    MonitoringConfig: {
        "kl_threshold": (0.0, -1.0, NAN),
        "check_interval_steps": (0,),
        "reward_baseline_window": (0,),
        "consecutive_windows": (0,),
    },
    SamplingDefaults: {"top_p": (0,), "min_tokens": (17,)},
    GateConfig: dict.fromkeys(GateConfig.__struct_fields__, (0.0, -1.0, NAN)),
    ValidationConfig: {
        **dict.fromkeys(("reference_model", "prompts", "task"), ("",)),
        "num_prompts": (0,),
        "equivalence_trials": (31,),
        "max_tokens": (0,),
        "seed": (-1, 2**63),
        "position_probes": ((1.0, 0.0), (NAN,)),
        "tolerance": (0.0, INFINITE),
    },
    EngineConfig: {
        **dict.fromkeys(("name", "served_model", "api_key_env"), ("",)),
        "url": ("127.0.0.1:8000", "ftp://engine", "http://me:secret@engine:8000"),
        "env": ({"HF_TOKEN": "hf_…"},),
        "args": (("--api-key", "k"), ("--seed=1", "--hf_token=k")),
        "max_model_len": (1,),
        "max_num_batched_tokens": (-1,),
        **dict.fromkeys(("block_size", "max_num_seqs", "tensor_parallel_size", "concurrency"), (0,)),
        "startup_timeout_s": (0.0,),
        "request_timeout_s": (INFINITE,),
        "gpu_memory_utilization": (1.5, 90, NAN),
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, found in BAD.items()
        for name, values in found.items()
        for value in values
    ],
)
def test_a_bad_value_is_refused_by_name(kind, name, value):
    with pytest.raises(InvalidValue) as caught:
        kind(**{name: value})
    assert type(caught.value) is (InvalidSampling if kind is SamplingDefaults else InvalidValue)
    assert name in str(caught.value)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"url": URL, "python": "python"},
        {"url": URL, "args": ("--x",)},
        {"max_num_batched_tokens": 64, "max_num_seqs": 65},
        {"max_num_batched_tokens": 64, "max_model_len": 65, "enable_chunked_prefill": False},
    ],
)
def test_settings_that_no_engine_could_obey_together(bad):
    with pytest.raises(InvalidValue):
        EngineConfig(**bad)


@pytest.mark.parametrize(
    "good",
    [
        {"name": "vllm", "url": URL, "served_model": "policy", "api_key_env": "POLICY_KEY"},
        {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}, "python": "bin/python", "args": ("--enforce-eager",)},
        {"max_model_len": 2, "block_size": 1, "max_num_seqs": 1, "tensor_parallel_size": 1},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64, "max_model_len": 128},
        {"max_num_batched_tokens": 128, "max_model_len": 128, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
        {"gpu_memory_utilization": 1.0, "startup_timeout_s": 0.1},
    ],
)
def test_what_an_engine_can_obey_is_taken(good):
    engine = EngineConfig(**good)
    assert all(getattr(engine, name) == value for name, value in good.items())


def test_defaults_of_a_monitor_are_the_published_ones():
    assert MonitoringConfig() == MonitoringConfig(
        check_interval_steps=50,
        reward_baseline_window=1000,
        consecutive_windows=3,
        circuit_breaker_enabled=True,
    )


def test_sampling_defaults_are_the_parameters_that_requests_share():
    shared = set(SamplingDefaults.__struct_fields__)
    assert shared | OF_ONE_REQUEST == set(SamplingParams.__struct_fields__)
    assert not shared & OF_ONE_REQUEST
    assert SamplingDefaults().params() == SamplingParams()
    values: dict[str, Any] = dict.fromkeys(shared, 2)
    values |= {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "stop": ("end",), "stop_token_ids": (3,)}
    values |= {"max_tokens": 9, "ignore_eos": True}
    params = SamplingDefaults(**values).params()
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize("precision", Precision)
def test_gates_come_from_the_precision_and_ones_own_replace_them_one_by_one(precision):
    theirs = PROFILES[precision].gate
    assert ValidationConfig().gate_for(precision) == theirs
    lower = {"mean_abs": theirs.mean_abs / 2, "p90_abs": theirs.p90_abs / 2}
    assert ValidationConfig(gates=GateConfig(**lower)).gate_for(precision) == msgspec.structs.replace(
        theirs, **lower
    )


@pytest.mark.parametrize("loose", [{"mean_abs": 0.5}, {"p90_abs": 0.9}])
def test_a_gate_of_ones_own_that_would_never_decide_is_refused(loose):
    """With the profile's k3 in force, a run with half of that |Δ| would fail by k3, whatever was set."""
    with pytest.raises(InvalidValue):
        ValidationConfig(gates=GateConfig(**loose)).gate_for(Precision.BF16)
    assert ValidationConfig(gates=GateConfig(**loose, k3=0.5)).gate_for(Precision.BF16).k3 == 0.5


@pytest.mark.parametrize(
    ("tolerance", "own", "k3"), [(1e-3, None, 1e-3), (1.0, None, 2e-3), (None, None, 2e-3), (1e-4, 1.0, 1e-4)]
)
def test_tolerance_only_tightens(tolerance, own, k3):
    config = ValidationConfig(tolerance=tolerance, gates=GateConfig(k3=own))
    assert config.gate_for(Precision.BF16).k3 == k3


@pytest.mark.parametrize("beside", [{"prompts": "mine.jsonl"}, {"position_probes": (0.5,)}])
def test_a_task_brings_its_own_prompts(beside):
    assert ValidationConfig(task="sums").task == "sums"
    with pytest.raises(InvalidValue):
        ValidationConfig(task="sums", **beside)


def test_the_engine_must_hold_what_training_needs():
    trained = ModelConfig(max_model_len=100)
    for served in (100, 200):
        RunConfig(model=trained, engine=EngineConfig(max_model_len=served))
    with pytest.raises(InvalidValue):
        RunConfig(model=trained, engine=EngineConfig(max_model_len=99))


@pytest.mark.parametrize(
    "limit", [{"model": ModelConfig(max_model_len=33)}, {"engine": EngineConfig(max_model_len=33)}]
)
def test_outputs_must_leave_room_for_a_prompt(limit):
    RunConfig(**limit)
    with pytest.raises(InvalidValue):
        RunConfig(**limit, validation=ValidationConfig(max_tokens=33))
    with pytest.raises(InvalidValue):
        RunConfig(**limit, sampling_defaults=SamplingDefaults(max_tokens=33))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"equivalence_trials": 31}, "32 trials or more (--trials), or fewer prompts (--num-prompts)"),
        ({"equivalence_trials": 10**11}, "at most 1000000 trials"),
        ({"num_prompts": 10**11}, "use from 1 to 1000000 prompts"),
    ],
)
def test_advice_about_trials_and_prompts_can_be_taken(given, says):
    with pytest.raises(InvalidValue) as caught:
        ValidationConfig(**given)
    assert str(caught.value).endswith(says)
