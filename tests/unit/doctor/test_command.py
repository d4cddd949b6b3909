"""Command lines and launch scripts: read as vLLM reads them, and corrected where they are one command."""

from pathlib import Path

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.setting import Origin, Value

IMAGE = "vllm/vllm-openai:v0.32.0"
HEAD = """--hf-overrides '{"head_dtype":"float32"}'"""
ROPE = """--hf_overrides='{"rope_theta":1}'"""
JSON = '{"backend": "FLASHINFER"}'
UNKNOWN = "unknown"


def value(command: str, name: str) -> Value:
    setting = CommandLine(command).read().settings[name]
    return setting.value if setting.known else UNKNOWN


def exit_code(command: str) -> int:
    return diagnose(CommandLine(command), {})[0].exit_code


def refused(command: str) -> str:
    return str(value(command, "refused") or "")


def fixed(command: str, changes: dict[str, Value] | None = None) -> str | None:
    target = CommandLine(command)
    corrected = target.corrected(fixes(diagnose(target, {})[1]) if changes is None else changes)
    return None if corrected is None else corrected.text


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--logprobs-mode processed_logprobs", "logprobs_mode", "processed_logprobs"),
        ("--logprobs_mode=processed_logprobs", "logprobs_mode", "processed_logprobs"),
        ("--logprobs-mode raw_logits --logprobs-mode raw_logprobs", "logprobs_mode", "raw_logprobs"),
        ("--logprobs-m raw_logits", "logprobs_mode", "raw_logits"),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--no_enable_prefix", "prefix_caching", False),
        ("--enable_prefix_caching", "prefix_caching", True),
        ("--enforce", "enforce_eager", True),
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--max-model-l=8K", "max_model_len", 8192),
        ("--max-model-len 1.5k", "max_model_len", 1500),
        ("--max-model-len AUTO", "max_model_len", "AUTO"),
        ("--max-logprobs -1", "max_logprobs", -1),
        ("--seed 1_0", "seed", 10),
        ("-tp 4", "tensor_parallel_size", 4),
        ("-tp=2", "tensor_parallel_size", 2),
        ("-t 2", "tensor_parallel_size", 2),
        ("-e", "expert_parallel", True),
        ("-q fp8", "quantization", "fp8"),
        ("-qfp8", "quantization", "fp8"),
        ("-O3", "enforce_eager", False),
        ("-O 3", "enforce_eager", False),
        ("--dtype half", "dtype", "half"),
        ("--uds /tmp/socket", "host", "unix socket"),
        ("--api-key a b", "api_key", True),
        ('--api-key "$KEY"', "api_key", True),
        ("--attention-backend triton_attn", "attention_backend", "TRITON_ATTN"),
        ("--attention-backend auto", "attention_backend", None),
        (f"--attention-config '{JSON}'", "attention_backend", "FLASHINFER"),
        ("--attention-config.backend FLASHINFER", "attention_backend", "FLASHINFER"),
        ("-ac.backend=auto", "attention_backend", None),
        ("--attention-config.flash_attn_version 2", "attention_backend", None),
        ('--attention-backend FLASHINFER --attention-config "$CFG"', "attention_backend", "FLASHINFER"),
        (f"""--attention-config '{JSON}' --attention-config "$CFG" """, "attention_backend", UNKNOWN),
        ('--attention-config.backend "$B"', "attention_backend", UNKNOWN),
        ("""--override-gen '{"top_p": 0.9, "temperature": 1.0}'""", "override_generation_config", "top_p"),
        (HEAD, "head_dtype", "float32"),
        (HEAD, "hf_overrides", None),
        ("--hf-over.head_dtype float32", "head_dtype", "float32"),
        # As the parser of vLLM 0.32 answers: of whole JSONs the last counts, and dotted forms go last wherever they stand.
        (f"{HEAD} {ROPE}", "head_dtype", "model"),
        (f"{ROPE} {HEAD}", "hf_overrides", None),
        ("--hf-overrides.head_dtype float32 --hf_overrides.rope_theta=1", "hf_overrides", "rope_theta"),
        (f"--hf-overrides.head_dtype float32 {ROPE}", "head_dtype", "float32"),
        (f"{HEAD} --hf-overrides.rope_theta 1", "head_dtype", "model"),
        ('--hf-overrides "$OV"', "head_dtype", UNKNOWN),
        ("--dtype $DTYPE", "dtype", UNKNOWN),
        ("""--dtype "it's $X, isn't it" """, "dtype", UNKNOWN),
        ("--dtype hal$F", "dtype", UNKNOWN),
        ("--dtype '$DTYPE'", "dtype", "auto"),  # refused, so not in force
        ("--logprobs-mode PROCESSED_LOGPROBS", "logprobs_mode", "raw_logprobs"),
        ("--enable-prefix-caching=False", "prefix_caching", True),
        # None is as if nothing were said, and does not undo what another flag says.
        ("--quantization None", "quantization", UNKNOWN),
        ("--kv-offloading-size None", "kv_transfer", None),
        ("--speculative-config null", "speculative", None),
        ("--speculative-config None --spec-method ngram", "speculative", "--spec-method"),
        ("--watermark-config ''", "watermark", None),
        ("--host None", "host", "0.0.0.0"),
    ],
)
def test_flags_are_read_as_vllm_reads_them(words: str, name: str, expected: Value) -> None:
    assert value(f"vllm serve Q {words}", name) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--logprobs-mode raw", "raw is none of processed_logits"),
        ("--dtype None", "is none of"),
        ("--spec-method NGRAM", "and 20 more"),
        ("--enable-prefix-caching=False", "--no-enable-prefix-caching"),
        ("--headless=1", "takes no value"),
        ("--max-logprobs nan", "is no number (integer)"),
        ("--max-logprobs 8k", "is no number"),
        ("--seed 1e3", "is no number"),
        ("--seed=", "is no number"),
        ("--max-model-len 1.5K", "is no number (with a suffix, or auto)"),
        ("--max-num-batched-tokens auto", "is no number"),
        ("--kv-offloading-size x", "is no number (decimal or none)"),
        ("--lgprobs-mode x", "did you mean --logprobs-mode?"),
        ("--lgprobs-mode $X", "did you mean"),
        ("--no-logprobs-mode", "is no flag"),
        ("--ENFORCE-EAGER", "is no flag"),
        ("--conf x.yaml", "--config, --config-format"),
        ("--enable", "more"),
        ("-tp2", "is no flag"),
        ("--tp 2", "is no flag"),
        ("extra", "'extra'"),
        ("'$EXTRA'", "'$EXTRA'"),
        ("--api-key k --lgprobs-mode x", "--logprobs-mode"),
    ],
)
def test_what_vllm_refuses_is_wrong(words: str, reason: str) -> None:
    assert reason in refused(f"vllm serve Q {words}")
    assert exit_code(f"vllm serve Q {words}") == 1


@pytest.mark.parametrize(
    "command",
    [
        "ls -l",
        "vllm bench Q",
        'bash -c "vllm serve Q"',
        "docker run other/image --model m",
        f"docker run --entrypoint bash {IMAGE} -c x",
        "vllm/vllm-openai --model m",
        "# vllm serve m",
        "vllm serve 'Q",
        "vllm serve m\n--dtype half",
        "vllm serve m\nvllm serve n",
        "cat <<EOF\nVLLM_SERVER_DEV_MODE=1\nEOF\nvllm serve m",
        "vllm serve Q --dtype",
        "vllm serve Q --dtype --seed 1",
        "vllm serve Q --hf-overrides {a:1}",
        "vllm serve Q --hf-overrides 3",
        "vllm serve Q --config /no/such.yaml",
        f"vllm serve Q --attention-backend X --attention-config '{JSON}'",
    ],
)
def test_what_cannot_be_read_is_refused(command: str) -> None:
    with pytest.raises(ConfigError):
        CommandLine(command).read()


DEV = "VLLM_SERVER_DEV_MODE=1"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{DEV} vllm serve m", True),
        (f"nice -n 5 env {DEV} vllm serve m", True),
        (f"export A=2 {DEV}\n\nvllm serve m\n", True),
        (f"{DEV}\nexport VLLM_SERVER_DEV_MODE\nvllm serve m", True),
        ("MODE=1\nexport VLLM_SERVER_DEV_MODE=$MODE\nvllm serve m", True),
        (f"#!/bin/bash\nset -euo pipefail\ncd /models\nexport {DEV}\nvllm serve m > log 2>&1 &\n", True),
        (f"docker run -e {DEV} img vllm serve m", True),
        (f"docker run --env={DEV} {IMAGE} --model m", True),
        (f"podman run -e{DEV} img vllm serve m", True),
        (f"{DEV} docker run -e VLLM_SERVER_DEV_MODE img vllm serve m", UNKNOWN),
        (f"vllm serve m {DEV}", False),
        (f"{DEV}\nvllm serve m", False),  # not exported
        (f"{DEV} env VLLM_SERVER_DEV_MODE=0 vllm serve m", False),
        (f"{DEV} docker run img vllm serve m", False),
        (f"docker run --label {DEV} img vllm serve m", False),
        ("VLLM_SERVER_DEV_MODE=' 01 ' vllm serve m", True),
        ("VLLM_SERVER_DEV_MODE=00 vllm serve m", False),
        # What the shell, a branch or another file decides is unknown.
        ("VLLM_SERVER_DEV_MODE=$MODE vllm serve m", UNKNOWN),
        ('export VLLM_SERVER_DEV_MODE="${MODE:-1}"\nvllm serve m', UNKNOWN),
        ("docker run -e VLLM_SERVER_DEV_MODE img vllm serve m", UNKNOWN),
        (f"if [ -n x ]; then\n export {DEV}\nfi\nvllm serve m", UNKNOWN),
        (f"[ -n x ] && export {DEV}\nvllm serve m", UNKNOWN),
        ("source .env\nvllm serve m", UNKNOWN),
        ("set -a\nvllm serve m", UNKNOWN),
        ("docker run --env-file .env img vllm serve m", UNKNOWN),
        ("srun --export=ALL,A=1 vllm serve m", UNKNOWN),
        (f"{DEV} env -u VLLM_SERVER_DEV_MODE vllm serve m", UNKNOWN),
    ],
)
def test_variables_that_vllm_is_started_with(command: str, expected: Value) -> None:
    assert value(command, "dev_mode") == expected


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("VLLM_BATCH_INVARIANT", "2", True),
        ("VLLM_BATCH_INVARIANT", "true", UNKNOWN),
        ("VLLM_BATCH_INVARIANT", "", UNKNOWN),
        ("VLLM_USE_FLASHINFER_SAMPLER", "1.0", UNKNOWN),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "TRUE", True),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "2", False),
        ("VLLM_USE_V1", "0", False),
    ],
)
def test_most_switches_are_integers_and_two_are_words(variable: str, text: str, expected: Value) -> None:
    names = {
        "VLLM_BATCH_INVARIANT": "batch_invariant",
        "VLLM_USE_FLASHINFER_SAMPLER": "flashinfer_sampler",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "runtime_lora",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "long_max_model_len",
        "VLLM_USE_V1": "engine_v1",
    }
    command = f"{variable}='{text}' vllm serve m"
    assert value(command, names[variable]) == expected
    assert bool(refused(command)) is (expected == UNKNOWN)


@pytest.mark.parametrize(
    ("script", "name", "expected"),
    [
        ("LEN=8192\nvllm serve Q --max-model-len $LEN", "max_model_len", 8192),
        ('ARGS="--seed 3 -tp 2"\nvllm serve Q $ARGS', "tensor_parallel_size", 2),
        ('DTYPE=half\nvllm serve Q --dtype "${DTYPE}"', "dtype", "half"),
        ("DTYPE=half\nif x; then DTYPE=float; fi\nvllm serve Q --dtype $DTYPE", "dtype", UNKNOWN),
        ("DTYPE=half\nsource env.sh\nvllm serve Q --dtype $DTYPE", "dtype", UNKNOWN),
        ("DTYPE=half vllm serve Q --dtype $DTYPE", "dtype", UNKNOWN),  # the shell puts it in before it is set
        ('OV=\'{"a": 1}\'\nvllm serve Q --hf-overrides "$OV"', "hf_overrides", UNKNOWN),
        ("for i in 1 2; do\n vllm serve Q --seed $i\ndone", "seed", UNKNOWN),
        ("vllm serve Q --seed 3 2>&1 | tee log", "seed", 3),
        ("vllm serve Q --seed 3 > log --dtype half", "dtype", "half"),
        ("vllm serve \\\n  Q \\\n --seed 3 # why", "seed", 3),
    ],
)
def test_a_script_is_read_as_far_as_it_is_known(script: str, name: str, expected: Value) -> None:
    assert value(script, name) == expected
    assert refused(script) == ""


@pytest.mark.parametrize(
    "words", ["$EXTRA_ARGS", '"$@"', "${ARGS:-}", '--seed 1 "${MORE[@]}"', "$(cat flags)"]
)
def test_words_of_a_variable_cannot_be_seen(words: str) -> None:
    sound = f"vllm serve m --no-async-scheduling --logprobs-mode processed_logprobs {words}"
    assert value(sound, "unseen_words") == UNKNOWN
    assert exit_code(sound) == 3
    assert exit_code(str(fixed(sound))) == 3


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Q",
        "/opt/bin/vllm serve Q",
        "python -m vllm.entrypoints.openai.api_server --model Q",
        "env A=1 uv run python3 -mvllm.entrypoints.openai.api_server --model Q",
        f"docker run --gpus all -p 8000:8000 {IMAGE} --model Q",
        "podman run docker.io/vllm/vllm-openai-rocm:latest --model=Q",
        "docker run vllm/vllm-openai@sha256:ab12 Q",
        "vllm serve --api-key=hunter2 Q --seed 1",
        "MODEL=Q\nvllm serve $MODEL",
    ],
)
def test_programs_that_are_vllm(command: str) -> None:
    assert CommandLine(command).model == "Q"


def test_defaults_and_what_is_not_judged() -> None:
    reading = CommandLine(
        "HF_HOME=/x vllm serve Q --seed 0 --block-size 32 --disable-log-stats --port 80"
    ).read()
    assert reading.not_judged == ("--block-size", "--disable-log-stats", "HF_HOME")
    origins = {name: reading.settings[name].origin for name in ("seed", "logprobs_mode", "max_model_len")}
    assert list(origins.values()) == [Origin.SET, Origin.DEFAULT, Origin.UNKNOWN]
    assert "cpu_attn_split_kv" not in reading.settings
    assert value("VLLM_CPU_KVCACHE_SPACE=1 vllm serve Q", "async_scheduling") is False
    assert value("CUDA_VISIBLE_DEVICES=0 vllm serve Q", "device") == "cuda"
    other = CommandLine("python -m pipelinerl.entrypoints.run_vllm1 --model Q --actor-llm-idx 0")
    assert "--actor-llm-idx is no flag of vLLM 0.32" in other.read().not_judged


CPU = "VLLM_CPU_KVCACHE_SPACE=1"


@pytest.mark.parametrize(
    ("variables", "fires"),
    [
        (CPU, True),
        (f"{CPU} MKL_CBWR=", True),
        (f"{CPU} MKL_CBWR=auto,STRICT", True),
        (f"{CPU} MKL_CBWR=AVX512_E1", True),
        # vLLM overwrites the number of threads where it binds them.
        (f"{CPU} OMP_NUM_THREADS=1", True),
        (f"{CPU} OMP_NUM_THREADS=$N VLLM_CPU_OMP_THREADS_BIND=nobind", True),
        (f"{CPU} OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind", False),
        (f"{CPU} MKL_CBWR=avx2,STRICT", False),
        (f"{CPU} MKL_CBWR=$BRANCH", False),
        ("CUDA_VISIBLE_DEVICES=0 MKL_CBWR=AUTO", False),
        ("MKL_CBWR=AUTO", False),
    ],
)
def test_threads_on_cpu_may_pick_different_kernels(variables: str, fires: bool) -> None:
    findings = diagnose(CommandLine(f"{variables} vllm serve Q"), {})[0].findings
    assert ("first-call-on-cpu" in {finding.rule for finding in findings}) is fires


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("vllm serve Q", {"seed": 3}, "vllm serve Q --seed 3"),
        ("vllm serve Q --seed 1 -tp 2", {"seed": 3}, "vllm serve Q --seed 3 -tp 2"),
        ("vllm serve Q --seed=1 -tp 2", {"seed": 3}, "vllm serve Q --seed=3 -tp 2"),
        ("vllm serve Q -q fp8 -tp 2", {"quantization": None}, "vllm serve Q -tp 2"),
        ("vllm serve Q", {"quantization": None}, "vllm serve Q"),
        ("vllm serve Q --async", {"async_scheduling": False}, "vllm serve Q --no-async-scheduling"),
        ("vllm serve Q --spec-method ngram --spec-tokens 3", {"speculative": None}, "vllm serve Q"),
        ("vllm serve Q --logprobs-mode raw", {"logprobs_mode": "x"}, "vllm serve Q --logprobs-mode x"),
        ("vllm serve Q", {"batch_invariant": True}, "VLLM_BATCH_INVARIANT=1 vllm serve Q"),
        ("A=1 env B=2 vllm serve Q", {"dev_mode": False}, "A=1 env VLLM_SERVER_DEV_MODE=0 B=2 vllm serve Q"),
        (
            "A='x y' nice -n 5 vllm serve Q",
            {"mkl_cbwr": "AVX2"},
            "A='x y' MKL_CBWR=AVX2 nice -n 5 vllm serve Q",
        ),
        (f"{DEV} vllm serve Q", {"dev_mode": False}, "VLLM_SERVER_DEV_MODE=0 vllm serve Q"),
        ("VLLM_USE_V1=0 vllm serve Q", {"engine_v1": None}, " vllm serve Q"),
        (
            f"docker run -e{DEV} i vllm serve Q",
            {"dev_mode": False},
            "docker run -eVLLM_SERVER_DEV_MODE=0 i vllm serve Q",
        ),
        (
            "vllm serve Q \\\n    -tp 2  # two",
            {"seed": 3},
            "vllm serve Q \\\n    -tp 2 \\\n    --seed 3  # two",
        ),
        ("vllm serve Q \\", {"seed": 3}, "vllm serve Q --seed 3"),
        ("vllm serve Q > log 2>&1 &", {"seed": 3}, "vllm serve Q --seed 3 > log 2>&1 &"),
        ("vllm serve $MODEL '$x'", {"seed": 3}, "vllm serve $MODEL '$x' --seed 3"),
        # What is left to its owner: requests, a JSON, a container's variables.
        ("vllm serve Q", {"temperature": 1.0}, "vllm serve Q"),
        (f"vllm serve Q -ac '{JSON}'", {"attention_backend": "X"}, f"vllm serve Q -ac '{JSON}'"),
        (f"docker run {IMAGE} Q", {"dev_mode": False}, f"docker run {IMAGE} Q"),
    ],
)
def test_a_change_leaves_the_rest_as_it_was(before: str, changes: dict[str, Value], after: str) -> None:
    assert fixed(before, changes) == after.strip()


@pytest.mark.parametrize(
    "script",
    [
        "export A=1\nvllm serve m",
        "cd /models; vllm serve m",
        "vllm serve m | tee log",
        "if true; then vllm serve m; fi",
    ],
)
def test_a_script_is_not_edited(script: str) -> None:
    assert fixed(script) is None
    assert exit_code(script) == 1


def test_a_correction_has_nothing_wrong_and_is_left_alone() -> None:
    after = fixed("vllm serve m --logprobs-mode raw --enable-prefix-caching=False # prod")
    assert after is not None
    assert exit_code(after) == 0
    assert fixed(after) == after
    # Whoever wrote it meant something, and taking it out would hide that.
    assert exit_code(str(fixed("vllm serve Q --tensr-parallel-size 4"))) == 1


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: Q\nlogprobs-mode: processed_logprobs\nseed: 3\nenable_prefix_caching: false\nmystery: 1\n"
        "hf-overrides: {head_dtype: float32}\nattention-config: {backend: FLASHINFER}\n"
    )
    command = f"vllm serve --config {file} --seed 4"
    expected = {
        "logprobs_mode": "processed_logprobs",
        "seed": 4,
        "prefix_caching": True,
        "dropped_lines": "enable_prefix_caching",
        "refused": "--mystery is no flag of vLLM 0.32",
        "head_dtype": "float32",
    }
    assert {name: value(command, name) for name in expected} == expected
    assert value(f"{command} {ROPE}", "head_dtype") == "model"
    assert CommandLine(command).typed("dropped_lines", None) == "--no-enable-prefix-caching"
    # What stands in the file is left to its owner.
    assert fixed(command, {"dropped_lines": None, "attention_backend": "TRITON_ATTN"}) == command
    assert value(f"vllm serve Q --config={file}", "ignored_config") == str(file)
    assert value(f"vllm serve Q --config={file}", "seed") == 0
    assert CommandLine(f"vllm serve Q --config={file}").typed("ignored_config", None) == f"--config {file}"
    assert CommandLine(f"{command} --config=b").typed("ignored_config", None) == "remove --config=b"
    assert "ignored_config" not in CommandLine("vllm serve Q").read().settings


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("override-generation-config: {temperature: 1.0}", "generation_defaults", None),
        ("override-generation-config.temperature: 1.0", "generation_defaults", None),
        ("hf-config-path: {plain}", "generation_defaults", None),
        ("generation-config: auto", "generation_defaults", "temperature 0.6"),
        ("speculative-config: null", "speculative", None),
        ("hf-overrides: {quantization_config: {quant_method: fp8}}", "quantization", "fp8"),
    ],
)
def test_a_line_of_the_file_means_the_same_as_the_flag(
    tmp_path: Path, line: str, name: str, expected: Value
) -> None:
    for place, content in (("warm", '{"temperature": 0.6}'), ("plain", "{}")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "generation_config.json").write_text(content)
        (tmp_path / place / "config.json").write_text("{}")
    file = tmp_path / "serve.yaml"
    file.write_text(line.replace("{plain}", str(tmp_path / "plain")) + "\n")
    assert value(f"vllm serve {tmp_path}/warm --config {file}", name) == expected
