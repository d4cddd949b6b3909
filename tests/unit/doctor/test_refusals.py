"""Words that vLLM's parser takes and words that it refuses; tests/engines/test_vllm_doctor.py asks a real one."""

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.setting import Origin, Value
from zerodrift.doctor.target import Target

REFUSED = {
    "--logprobs-mode raw": "raw is none of processed_logits, processed_logprobs, raw_logits, raw_logprobs",
    "--logprobs-mode PROCESSED_LOGPROBS": "is none of",
    "--dtype None": "is none of",
    "--spec-method NGRAM": "and 20 more",
    "--enable-prefix-caching=False": "takes no value, only --enable-prefix-caching or --no-enable-prefix-caching",
    "--headless=1": "takes no value, only --headless",
    "--max-logprobs nan": "is no number (integer)",
    "--max-logprobs 8k": "is no number",
    "--seed 1e3": "is no number",
    "--seed=": "is no number",
    "--max-model-len 1.5K": "is no number (with a suffix, or auto)",
    "--max-num-batched-tokens auto": "is no number",
    "--kv-offloading-size x": "is no number (decimal or none)",
    "--lgprobs-mode x": "--lgprobs-mode is no flag of vLLM 0.32; did you mean --logprobs-mode?",
    "--lgprobs-mode $X": "did you mean",
    "--no-logprobs-mode": "is no flag",
    "--ENFORCE-EAGER": "is no flag",
    "--conf x.yaml": "--conf could be --config, --config-format",
    "--enable": "more",
    "-tp2": "is no flag",
    "--tp 2": "is no flag",
    "extra": "the word 'extra' belongs to no flag",
}
TAKEN: dict[str, tuple[str, Value]] = {
    """--override-gen '{"top_p": 0.9}'""": ("override_generation_config", "top_p"),
    "--enforce": ("enforce_eager", True),
    "--no-enable-prefix": ("prefix_caching", False),
    "--no_enable_prefix": ("prefix_caching", False),
    "--logprobs-m raw_logits": ("logprobs_mode", "raw_logits"),
    "--max-model-l=1k": ("max_model_len", 1000),
    "--hf-over.head_dtype float32": ("head_dtype", "float32"),
    "-t 2": ("tensor_parallel_size", 2),
    "-tp=2": ("tensor_parallel_size", 2),
    "-qfp8": ("quantization", "fp8"),
    "-e": ("expert_parallel", True),
    "-O 3": ("enforce_eager", False),
    "--max-model-len AUTO": ("max_model_len", "AUTO"),
    "--kv-offloading-size None": ("kv_transfer", None),
    "--dtype half": ("dtype", "half"),
    "--seed 1_0": ("seed", 10),
}


def refused(target: Target) -> str:
    return str(target.read().settings["refused"].value or "")


@pytest.mark.parametrize("words", REFUSED)
def test_what_vllm_refuses_is_wrong(words: str) -> None:
    target = CommandLine(f"vllm serve Q {words}")
    diagnosis, _ = diagnose(target, {})
    assert REFUSED[words] in refused(target)
    assert diagnosis.exit_code == 1
    assert "refused" in {finding.rule for finding in diagnosis.findings}


def test_flags_of_another_server_are_listed() -> None:
    target = CommandLine("python -m pipelinerl.entrypoints.run_vllm1 --model Q --actor-llm-idx 0 --dtype x")
    assert refused(target).startswith("--dtype x is none of")
    assert "--actor-llm-idx is no flag of vLLM 0.32" in target.read().not_judged


@pytest.mark.parametrize("words", TAKEN)
def test_what_vllm_takes_is_judged(words: str) -> None:
    target = CommandLine(f"vllm serve Q {words}")
    name, expected = TAKEN[words]
    assert refused(target) == ""
    assert target.read().settings[name].value == expected
    assert not target.read().not_judged or words.startswith("-O")


def test_a_value_that_is_refused_is_not_in_force() -> None:
    settings = CommandLine("vllm serve Q --logprobs-mode PROCESSED_LOGPROBS").read().settings
    assert (settings["logprobs_mode"].value, settings["logprobs_mode"].origin) == (
        "raw_logprobs",
        Origin.DEFAULT,
    )
    settings = CommandLine("vllm serve Q --enable-prefix-caching=False").read().settings
    assert settings["prefix_caching"].value is True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('enable-prefix-caching: "false"', "--enable-prefix-caching takes no value"),
        ("async-scheduling: 0", "--async-scheduling takes no value"),
        ("max-logprobs: null", "--max-logprobs None is no number"),
        ("enforce_eager: null", "--enforce-eager takes no value"),
        ("logprobs_mode: raw", "--logprobs-mode raw is none of"),
        ("logprob-mode: raw_logits", "did you mean --logprobs-mode?"),
        ("quantization: null", ""),
        ("dtype: false", ""),
        ("max-logprobs: -1", ""),
    ],
)
def test_lines_of_a_file(line: str, words: str) -> None:
    target = open_text(f"model: Q\n{line}\n", "file.yaml", FileKind.VLLM)
    assert words in refused(target)
    assert bool(refused(target)) is bool(words)
    assert "dtype: false, which vLLM drops" in target.read().not_judged or line != "dtype: false"


def test_arguments_of_our_own_file() -> None:
    target = open_text("engine: {name: vllm, args: ['--logprobs-mode', raw]}\n", "file.yaml", None)
    assert "is none of" in refused(target)
    assert diagnose(target, {})[0].exit_code == 1


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("--logprobs-mode raw", "--logprobs-mode processed_logprobs"),
        ("--logprobs-m raw_logits", "--logprobs-m processed_logprobs"),
        ("--enable-prefix-caching=False", "--no-enable-prefix-caching"),
        ("--enable-prefix", "--no-enable-prefix-caching"),
    ],
)
def test_a_correction_is_taken(words: str, after: str) -> None:
    target = CommandLine(f"vllm serve Q {words}")
    fixed = CommandLine(target.changed(cures(diagnose(target, {})[1])))
    assert f"Q {after}" in fixed.text
    assert diagnose(fixed, {})[0].exit_code == 0


def test_a_flag_that_does_not_exist_stays_wrong() -> None:
    """Whoever wrote it meant something, and taking it out would hide that."""
    target = CommandLine("vllm serve Q --tensr-parallel-size 4")
    fixed = CommandLine(target.changed(cures(diagnose(target, {})[1])))
    assert "--tensr-parallel-size 4" in fixed.text
    assert diagnose(fixed, {})[0].exit_code == 1


def test_a_secret_behind_a_short_form_is_hidden() -> None:
    assert CommandLine("vllm serve Q --api-k hunter2").changed({}) == 'vllm serve Q --api-k "$VLLM_API_KEY"'
