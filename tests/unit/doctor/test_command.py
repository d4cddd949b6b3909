"""Command lines: read as vLLM reads them, and corrected."""

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.setting import Origin, Value

HEAD = """--hf-overrides '{"head_dtype":"float32"}'"""
ROPE = """--hf_overrides='{"rope_theta":1}'"""
JSON = '{"backend": "FLASHINFER"}'
UNKNOWN = "unknown"
DEV = "VLLM_SERVER_DEV_MODE=1"
CPU = "VLLM_CPU_KVCACHE_SPACE=1"


def value(command: str, name: str) -> Value:
    setting = CommandLine(command).read().settings[name]
    return setting.value if setting.known else UNKNOWN


def exit_code(command: str) -> int:
    return diagnose(CommandLine(command), {})[0].exit_code


def fixed(command: str, changes: dict[str, Value] | None = None) -> str:
    target = CommandLine(command)
    return target.corrected(fixes(diagnose(target, {})[1]) if changes is None else changes).text


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--logprobs_mode=processed_logprobs", "logprobs_mode", "processed_logprobs"),
        ("--logprobs-mode raw_logits --logprobs-mode raw_logprobs", "logprobs_mode", "raw_logprobs"),
        ("--logprobs-m raw_logits", "logprobs_mode", "raw_logits"),
        ("--no_enable_prefix", "prefix_caching", False),
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--max-model-l=8K", "max_model_len", 8192),
        ("--max-model-len 1.5k", "max_model_len", 1500),
        ("--max-model-len AUTO", "max_model_len", "AUTO"),
        ("--max-logprobs -1", "max_logprobs", -1),
        ("--seed 1_0", "seed", 10),
        ("-tp=2", "tensor_parallel_size", 2),
        ("-t 2", "tensor_parallel_size", 2),
        ("-qfp8", "quantization", "fp8"),
        ("-O3", "refused", None),
        ("--uds /tmp/socket", "host", "unix socket"),
        ("--api-key a b", "api_key", True),
        ('--api-key "$KEY"', "api_key", True),
        ("--attention-backend triton_attn", "attention_backend", "TRITON_ATTN"),
        (f"--attention-config '{JSON}'", "attention_backend", "FLASHINFER"),
        ("-ac.backend=auto", "attention_backend", None),
        ('--attention-backend FLASHINFER --attention-config "$CFG"', "attention_backend", "FLASHINFER"),
        (f"""--attention-config '{JSON}' --attention-config "$CFG" """, "attention_backend", UNKNOWN),
        ("""--override-gen '{"top_p": 0.9, "temperature": 1.0}'""", "override_generation_config", "top_p"),
        ("--override-generation-config.temperature 1.0", "override_generation_config", None),
        (HEAD, "head_dtype", "float32"),
        (HEAD, "hf_overrides", None),
        # As the parser of vLLM 0.32 answers: of whole JSONs the last counts, and dotted forms go last wherever they stand.
        (f"{HEAD} {ROPE}", "head_dtype", "model"),
        ("--hf-overrides.head_dtype float32 --hf_overrides.rope_theta=1", "hf_overrides", "rope_theta"),
        (f"--hf-overrides.head_dtype float32 {ROPE}", "head_dtype", "float32"),
        ('--hf-overrides "$OV"', "head_dtype", UNKNOWN),
        ("--dtype hal$F", "dtype", UNKNOWN),
        ("""--dtype "it's $X, isn't it" """, "dtype", UNKNOWN),
        # Refused, so not in force.
        ("--enable-prefix-caching=False", "prefix_caching", True),
        # None is as if nothing were said, and does not undo what another flag says.
        ("--quantization None", "quantization", UNKNOWN),
        ("--speculative-config null", "speculative", None),
        ("--speculative-config None --spec-method ngram", "speculative", "--spec-method"),
        ("--watermark-config ''", "watermark", None),
        ("--host None", "host", "0.0.0.0"),
    ],
)
def test_flags_are_read_as_vllm_reads_them(words, name, expected):
    assert value(f"vllm serve Q {words}", name) == expected


@pytest.mark.parametrize(
    "words",
    [
        *("--logprobs-mode raw", "--enable-prefix-caching=False", "--headless=1", "--enable-lora.x 1"),
        *("--max-logprobs nan", "--seed 1e3", "--seed=", "--max-model-len 1.5K", "--kv-offloading-size x"),
        *("--max-num-batched-tokens auto", "--lgprobs-mode $X", "--no-logprobs-mode", "--ENFORCE-EAGER"),
        *("--conf x.yaml", "--enable", "-tp2", "--tp 2", "extra", "--api-key k --lgprobs-mode x"),
    ],
)
def test_what_vllm_refuses_is_wrong(words):
    assert value(f"vllm serve Q {words}", "refused")
    assert exit_code(f"vllm serve Q {words}") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--max-model-len -5", "at least -1"),
        ("--max-model-len 0", "not 0"),
        ("--max-num-seqs 0", "at least 1"),
        ("--gpu-memory-utilization 1.7", "at most 1"),
        ("--gpu-memory-utilization=0", "above 0"),
        ("-tp 0", "at least 1"),
        ("--max-num-batched-tokens 0", "at least 1"),
        ("--watermark 1.0", "below 1"),
    ],
)
def test_a_number_that_vllm_stops_at_is_wrong(words, wanted):
    assert f"it must be {wanted}" in str(value(f"vllm serve Q {words}", "refused"))


@pytest.mark.parametrize(
    "words",
    [
        *("--max-model-len -1", "--max-model-len auto", "--max-model-len 8k", "--max-num-seqs 1"),
        *(
            "--gpu-memory-utilization 1.0",
            "--gpu-memory-utilization .5",
            "--max-num-seqs $N",
            "--max-logprobs -1",
        ),
    ],
)
def test_numbers_at_the_end_of_their_range_are_taken(words):
    assert value(f"vllm serve Q {words}", "refused") is None


def test_what_may_have_been_meant():
    assert "--logprobs-mode" in str(value("vllm serve Q --lgprobs-mode x", "refused"))


@pytest.mark.parametrize(
    "command",
    [
        *("ls -l", "vllm bench Q", 'bash -c "vllm serve Q"', "# vllm serve m", "vllm serve 'Q"),
        *("vllm serve Q --dtype", "vllm serve Q --dtype --seed 1", "vllm serve Q --config /no/such.yaml"),
        *("vllm serve Q --hf-overrides {a:1}", "vllm serve Q --hf-overrides 3"),
        f"vllm serve Q --attention-backend X --attention-config '{JSON}'",
        # More than one command, or variables from elsewhere.
        *("vllm serve m\n--dtype half", "vllm serve m # why\n--dtype half", "vllm serve m\nvllm serve n"),
        *("export A=1\nvllm serve m", f"{DEV}\nvllm serve m", "source .env; vllm serve m"),
        *("cd /models && vllm serve m", "vllm serve m | tee log", "vllm serve m $(cat flags)"),
        *("for i in 1 2; do vllm serve m; done", "cat <<EOF\nA=1\nEOF\nvllm serve m"),
        *("env -u A vllm serve m", "srun --export=ALL,A=1 vllm serve m", "kubectl exec pod -- vllm serve m"),
        *("docker run -e A=1 img vllm serve m", "docker run vllm/vllm-openai --model m"),
    ],
)
def test_what_cannot_be_read_is_refused(command):
    with pytest.raises(ConfigError):
        CommandLine(command).read()


def test_another_engine_is_refused_with_what_can_be_asked_of_it():
    with pytest.raises(ConfigError) as refused:
        CommandLine("python -m sglang.launch_server --model-path m").read()
    assert "--engine sglang" in str(refused.value)


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        (f"nohup env {DEV} vllm serve m", "dev_mode", True),
        (f"#!/bin/bash\n# ours\n\n{DEV} exec vllm serve m > log 2>&1 &\n", "dev_mode", True),
        (f"{DEV} env VLLM_SERVER_DEV_MODE=0 vllm serve m", "dev_mode", False),
        (f"vllm serve m --served-model-name {DEV}", "dev_mode", False),
        ("VLLM_SERVER_DEV_MODE=' 01 ' vllm serve m", "dev_mode", True),
        ('VLLM_SERVER_DEV_MODE="${MODE:-1}" vllm serve m', "dev_mode", UNKNOWN),
        # Most switches are integers, and two are words.
        ("VLLM_BATCH_INVARIANT=2 vllm serve m", "batch_invariant", True),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=TRUE vllm serve m", "runtime_lora", True),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=2 vllm serve m", "long_max_model_len", False),
        (f"{CPU} vllm serve m", "async_scheduling", False),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m", "device", "cuda"),
    ],
)
def test_variables_that_vllm_is_started_with(command, name, expected):
    assert value(command, name) == expected
    assert value(command, "refused") is None


@pytest.mark.parametrize("text", ["true", "", "1.0"])
def test_variables_that_stop_vllm(text):
    assert value(f"VLLM_BATCH_INVARIANT='{text}' vllm serve m", "batch_invariant") == UNKNOWN
    assert value(f"VLLM_BATCH_INVARIANT='{text}' vllm serve m", "refused")


@pytest.mark.parametrize("words", ["$EXTRA_ARGS", '"$@"', "${ARGS:-}", '--seed 1 "${MORE[@]}"'])
def test_words_of_a_variable_cannot_be_seen(words):
    sound = f"vllm serve m --no-async-scheduling --logprobs-mode processed_logprobs {words}"
    assert value(sound, "unseen_words") == UNKNOWN
    assert exit_code(sound) == 3
    assert exit_code(fixed(sound)) == 3


@pytest.mark.parametrize(
    "command",
    [
        "/opt/bin/vllm serve Q",
        "env A=1 uv run python3.11 -m vllm.entrypoints.openai.api_server --model=Q",
        "vllm serve --api-key=hunter2 Q --seed 1",
        "vllm serve \\\n  Q \\\n --seed 3 # why",
    ],
)
def test_programs_that_are_vllm(command):
    assert CommandLine(command).model == "Q"


def test_defaults_and_what_is_not_judged():
    command = "HF_HOME=/x vllm serve Q --seed 0 --block-size 32 --dtype $D --port 80 --api-key $K"
    reading = CommandLine(command).read()
    assert [text.partition(":")[0] for text in reading.not_judged] == ["--block-size", "--dtype", "HF_HOME"]
    origins = {name: reading.settings[name].origin for name in ("seed", "logprobs_mode", "max_model_len")}
    assert list(origins.values()) == [Origin.SET, Origin.DEFAULT, Origin.UNKNOWN]
    assert "cpu_attn_split_kv" not in reading.settings


@pytest.mark.parametrize(
    ("variables", "fires"),
    [
        (CPU, True),
        (f"{CPU} MKL_CBWR=auto,STRICT", True),
        (f"{CPU} MKL_CBWR=AVX512_E1", True),
        # vLLM overwrites the number of threads where it binds them.
        (f"{CPU} OMP_NUM_THREADS=1", True),
        (f"{CPU} OMP_NUM_THREADS=$N VLLM_CPU_OMP_THREADS_BIND=nobind", True),
        (f"{CPU} OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind", False),
        (f"{CPU} MKL_CBWR=avx2,STRICT", False),
        (f"{CPU} MKL_CBWR=$BRANCH", False),
        ("CUDA_VISIBLE_DEVICES=0 MKL_CBWR=AUTO", False),
    ],
)
def test_threads_on_cpu_may_pick_different_kernels(variables, fires):
    findings = diagnose(CommandLine(f"{variables} vllm serve Q"), {})[0].findings
    assert ("first-call-on-cpu" in {finding.rule for finding in findings}) is fires


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("vllm serve Q \\", {"seed": 3}, "vllm serve Q --seed 3"),
        ("vllm serve Q --seed=1 -tp 2 --seed 2", {"seed": 3}, "vllm serve Q -tp 2 --seed 3"),
        ("vllm serve Q -q fp8 -tp 2", {"quantization": None}, "vllm serve Q -tp 2"),
        ("vllm serve Q --async", {"async_scheduling": False}, "vllm serve Q --no-async-scheduling"),
        ("vllm serve Q --spec-method ngram --spec-tokens 3", {"speculative": None}, "vllm serve Q"),
        (
            "#!/bin/sh\nA='x y' vllm serve Q",
            {"dev_mode": False},
            f"#!/bin/sh\n{DEV[:-1]}0 A='x y' vllm serve Q",
        ),
        (f"{DEV} vllm serve Q", {"dev_mode": False}, f"{DEV[:-1]}0 vllm serve Q"),
        ("VLLM_USE_V1=0 vllm serve Q", {"engine_v1": None}, "vllm serve Q"),
        ("vllm serve Q \\\n  -tp 2  # two", {"seed": 3}, "vllm serve Q \\\n  -tp 2 \\\n  --seed 3  # two"),
        ("vllm serve Q > log 2>&1 &", {"seed": 3}, "vllm serve Q --seed 3 > log 2>&1 &"),
        ("vllm serve $MODEL '$x'", {"seed": 3}, "vllm serve $MODEL '$x' --seed 3"),
        # What is left to its owner: requests, a JSON.
        ("vllm serve Q", {"temperature": 1.0}, "vllm serve Q"),
        (f"vllm serve Q -ac '{JSON}'", {"attention_backend": "X"}, f"vllm serve Q -ac '{JSON}'"),
    ],
)
def test_a_change_leaves_the_rest_as_it_was(before, changes, after):
    assert fixed(before, changes) == after


def test_a_correction_has_nothing_wrong_and_is_left_alone():
    after = fixed("vllm serve m --logprobs-mode raw --enable-prefix-caching=False # prod")
    assert exit_code(after) == 0
    assert fixed(after) == after
    # Whoever wrote it meant something, and taking it out would hide that.
    assert exit_code(fixed("vllm serve Q --tensr-parallel-size 4")) == 1


def test_flags_win_over_the_file(tmp_path):
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
    assert CommandLine(command).model == "Q"
    assert value(f"{command} {ROPE}", "head_dtype") == "model"
    assert CommandLine(command).typed("dropped_lines", None) == "--no-enable-prefix-caching"
    # What stands in the file is left to its owner.
    assert fixed(command, {"dropped_lines": None, "attention_backend": "TRITON_ATTN"}) == command
    assert value(f"{command} --config {file}", "refused") != expected["refused"]


def test_a_config_behind_an_equals_sign_is_not_read_by_vllm(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("seed: 3\n")
    assert value(f"vllm serve Q --config={file}", "ignored_config") == str(file)
    assert value(f"vllm serve Q --config={file}", "seed") == 0
    assert CommandLine(f"vllm serve Q --config={file}").typed("ignored_config", None) == f"--config {file}"
    both = CommandLine(f"vllm serve Q --config {file} --config=b")
    assert both.typed("ignored_config", None) == "remove --config=b"
    assert "ignored_config" not in CommandLine("vllm serve Q").read().settings
