from pathlib import Path

import pytest

from zerodrift.config import shipped
from zerodrift.config.document import parse
from zerodrift.config.keys import fields, is_section
from zerodrift.config.load import load
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.config.shipped import Profile
from zerodrift.core.completion import LogprobContract, LogprobKind
from zerodrift.view.run_directory import flattened


def config(profile: Profile, directory: Path) -> RunConfig:
    path = directory / f"{profile}.yaml"
    path.write_text(shipped.text(profile), encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("profile", Profile)
def test_a_profile_is_complete_and_names_itself(profile):
    text = shipped.text(profile)
    values = parse(text, profile)
    assert isinstance(values, dict)
    # How one trains is no part of which engine to choose: profiles leave that section to its defaults.
    kept = {
        field.path for field in fields(RunConfig) if not is_section(field.kind) and field.path[:6] != "train."
    }
    # An empty mapping has no leaves of its own.
    assert {path for path, _ in flattened(values)} | {"engine.env"} == kept
    assert text.startswith(f"# zerodrift profile: {profile}\n")


# The decision matrix: what each deployment chooses where they disagree.
MATRIX = {
    "engine.logprobs_mode": ("raw_logprobs", *("processed_logprobs",) * 3),
    "engine.generation_config": ("auto", "vllm", "vllm", "vllm"),
    "engine.enable_prefix_caching": (True, False, False, False),
    "engine.async_scheduling": (True, False, False, False),
    "engine.head_dtype": ("auto", "float32", "float32", "float32"),
    "engine.enable_chunked_prefill": (True, True, True, True),
    "validation.position_probes": ((), (), (0.5, 1.0, 1.25, 1.5, 2.0), ()),
    "monitoring.circuit_breaker_enabled": (False, True, True, True),
}


@pytest.mark.parametrize("path", MATRIX)
def test_profiles_follow_the_decision_matrix(path, tmp_path):
    section, name = path.split(".")
    chosen = tuple(getattr(getattr(config(profile, tmp_path), section), name) for profile in Profile)
    assert chosen == MATRIX[path]


@pytest.mark.parametrize("profile", [profile for profile in Profile if profile is not Profile.SERVING])
def test_profiles_for_training_sample_what_a_trainer_can_reproduce(profile, tmp_path):
    run = config(profile, tmp_path)
    LogprobContract(kind=LogprobKind.PROCESSED, sampling=run.sampling_defaults.params())
    assert not run.engine.enable_prefix_caching


def test_numbers_in_comments_are_those_of_the_gates(tmp_path):
    gate = config(Profile.RL_TRAINING, tmp_path).validation.gate_for(Precision.BF16)
    assert f"mean |Δ| {gate.mean_abs}, k3 {gate.k3} for bf16" in shipped.text(Profile.RL_TRAINING)
