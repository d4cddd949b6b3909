"""Command lines: read as vLLM reads them, changed where they stand, and no secret in what comes out."""

from pathlib import Path

import pytest

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.setting import Origin, Value
from zerodrift.doctor.shell_words import split


def value(command: str, name: str) -> Value:
    return CommandLine(command).read().settings[name].value


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--logprobs-mode processed_logprobs", "logprobs_mode", "processed_logprobs"),
        ("--logprobs_mode=processed_logprobs", "logprobs_mode", "processed_logprobs"),
        ("--logprobs-mode raw_logits --logprobs-mode raw_logprobs", "logprobs_mode", "raw_logprobs"),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--enable_prefix_caching", "prefix_caching", True),
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--max-model-len 8K", "max_model_len", 8192),
        ("--max-logprobs -1", "max_logprobs", -1),
        ("-tp 4", "tensor_parallel_size", 4),
        ("-q fp8", "quantization", "fp8"),
        ('--hf-overrides \'{"head_dtype": "float32"}\'', "head_dtype", "float32"),
        ("--hf-overrides.head_dtype float32", "head_dtype", "float32"),
        ('--hf-overrides \'{"head_dtype": "float32"}\'', "hf_overrides", None),
        ("--uds /tmp/socket", "host", "unix socket"),
        ("--api-key a b", "api_key", True),
        ("-O3", "enforce_eager", False),
        ("--quantization None", "quantization", None),
        ("--attention-backend triton_attn", "attention_backend", "TRITON_ATTN"),
        ("--attention-backend auto", "attention_backend", None),
        ('--attention-config \'{"backend": "flashinfer"}\'', "attention_backend", "FLASHINFER"),
        ("--attention-config.backend FLASHINFER", "attention_backend", "FLASHINFER"),
        ("-ac.backend=auto", "attention_backend", None),
        ("--attention-config.flash_attn_version 2", "attention_backend", None),
    ],
)
def test_flags_are_read_as_vllm_reads_them(words: str, name: str, expected: Value) -> None:
    assert value(f"vllm serve Q {words}", name) == expected


HEAD = """--hf-overrides '{"head_dtype":"float32"}'"""
ROPE = """--hf_overrides='{"rope_theta":1}'"""


@pytest.mark.parametrize(
    ("words", "head", "others"),
    [
        (f"{HEAD} {ROPE}", "model", "rope_theta"),
        (f"{ROPE} {HEAD}", "float32", None),
        ("--hf-overrides.head_dtype float32 --hf_overrides.rope_theta=1", "float32", "rope_theta"),
        # Dotted forms are put together and go last, wherever they stand.
        (f"--hf-overrides.head_dtype float32 {ROPE}", "float32", None),
        (f"{HEAD} --hf-overrides.rope_theta 1", "model", "rope_theta"),
    ],
)
def test_of_overrides_given_twice_one_is_in_force(words: str, head: str, others: str | None) -> None:
    """As the parser of vLLM 0.32 answers to the same words."""
    settings = CommandLine(f"vllm serve Q {words}").read().settings
    assert (settings["head_dtype"].value, settings["hf_overrides"].value) == (head, others)


def test_overrides_of_a_command_replace_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: Q\nhf-overrides: {head_dtype: float32}\n")
    assert value(f"vllm serve --config {file}", "head_dtype") == "float32"
    assert value(f"vllm serve --config {file} {ROPE}", "head_dtype") == "model"


def test_a_default_says_that_it_is_one() -> None:
    settings = CommandLine("vllm serve Q").read().settings
    assert settings["logprobs_mode"].origin is Origin.DEFAULT
    assert settings["max_model_len"].origin is Origin.UNKNOWN
    assert CommandLine("vllm serve Q --seed 0").read().settings["seed"].origin is Origin.SET


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Q",
        "/opt/bin/vllm serve Q",
        "python -m vllm.entrypoints.openai.api_server --model Q",
        "env A=1 uv run python3 -m vllm.entrypoints.openai.api_server --model Q",
        "vllm serve \\\n  Q",
    ],
)
def test_programs_that_are_vllm(command: str) -> None:
    assert CommandLine(command).model == "Q"


def test_variables_before_the_program_count_and_behind_it_do_not() -> None:
    assert value("VLLM_BATCH_INVARIANT=1 vllm serve Q", "batch_invariant") is True
    assert value("env VLLM_BATCH_INVARIANT=1 nohup vllm serve Q", "batch_invariant") is True
    assert value("VLLM_BATCH_INVARIANT=0 vllm serve Q", "batch_invariant") is False
    assert value("vllm serve Q VLLM_BATCH_INVARIANT=1", "batch_invariant") is False


def test_cpu_has_defaults_of_its_own() -> None:
    assert value("VLLM_CPU_KVCACHE_SPACE=1 vllm serve Q", "async_scheduling") is False
    assert value("CUDA_VISIBLE_DEVICES=0 vllm serve Q", "device") == "cuda"
    assert "cpu_attn_split_kv" not in CommandLine("vllm serve Q").read().settings


def test_a_variable_of_the_shell_is_unknown() -> None:
    assert not CommandLine("vllm serve $MODEL --logprobs-mode $MODE").read().settings["logprobs_mode"].known


def test_what_is_not_judged_is_listed() -> None:
    words = "--block-size 32 --disable-log-stats"
    assert CommandLine(f"HF_HOME=/x vllm serve Q {words} --port 80").read().not_judged == (
        "--block-size",
        "--disable-log-stats",
        "HF_HOME",
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ls -l", "no vLLM server command"),
        ("vllm bench Q", "no vLLM server command"),
        ("vllm serve Q | tee log", "'|'"),
        ("vllm serve Q &", "'&'"),
        ("vllm serve 'Q", "never closed"),
        ("vllm serve Q --dtype", "without its value"),
        ("vllm serve Q --dtype --seed 1", "without its value"),
        ("vllm serve Q --hf-overrides {a:1}", "not JSON"),
        ("vllm serve Q --hf-overrides 3", "JSON object"),
        ("vllm serve Q --hf-overrides 3 --hf-overrides.a 3", "JSON object"),
        ("vllm serve Q --config /no/such.yaml", "no file"),
    ],
)
def test_a_refusal_names_the_problem(command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("|", r"\|")):
        CommandLine(command).read()


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("vllm serve Q", {"seed": 3}, "vllm serve Q --seed 3"),
        ("vllm serve Q --seed 1 -tp 2", {"seed": 3}, "vllm serve Q --seed 3 -tp 2"),
        ("vllm serve Q --seed=1 -tp 2", {"seed": 3}, "vllm serve Q --seed=3 -tp 2"),
        ("vllm serve Q -q fp8 -tp 2", {"quantization": None}, "vllm serve Q -tp 2"),
        ("vllm serve Q", {"quantization": None}, "vllm serve Q"),
        (
            "vllm serve Q --async-scheduling",
            {"async_scheduling": False},
            "vllm serve Q --no-async-scheduling",
        ),
        ("vllm serve Q --spec-method ngram --spec-tokens 3", {"speculative": None}, "vllm serve Q"),
        ("vllm serve Q", {"batch_invariant": True}, "VLLM_BATCH_INVARIANT=1 vllm serve Q"),
        (
            "A=1 B='x y' vllm serve Q",
            {"batch_invariant": False},
            "A=1 B='x y' VLLM_BATCH_INVARIANT=0 vllm serve Q",
        ),
        (
            "VLLM_BATCH_INVARIANT=1 vllm serve Q",
            {"batch_invariant": False},
            "VLLM_BATCH_INVARIANT=0 vllm serve Q",
        ),
        (
            "vllm serve Q",
            {"head_dtype": "float32"},
            """vllm serve Q --hf-overrides '{"head_dtype":"float32"}'""",
        ),
        (
            """vllm serve Q --hf-overrides '{"a": 1}' -tp 2""",
            {"head_dtype": "float32"},
            """vllm serve Q --hf-overrides '{"a": 1, "head_dtype": "float32"}' -tp 2""",
        ),
        (
            "vllm serve Q --hf-overrides.head_dtype model",
            {"head_dtype": "float32"},
            "vllm serve Q --hf-overrides.head_dtype float32",
        ),
        (
            "vllm serve Q --hf-overrides.rope_theta 1",
            {"head_dtype": "float32"},
            "vllm serve Q --hf-overrides.rope_theta 1 --hf-overrides.head_dtype float32",
        ),
        (
            """vllm serve Q --hf-overrides.a 1 --hf-overrides '{"b": 1}'""",
            {"head_dtype": "float32"},
            """vllm serve Q --hf-overrides.a 1 --hf-overrides '{"b": 1}' --hf-overrides.head_dtype float32""",
        ),
        (
            "vllm serve Q --attention-config.backend FLASHINFER -tp 2",
            {"attention_backend": "TRITON_ATTN"},
            "vllm serve Q --attention-config.backend TRITON_ATTN -tp 2",
        ),
        (
            "vllm serve Q -ac.backend=FLASHINFER --attention-config.flash_attn_version 2",
            {"attention_backend": "TRITON_ATTN"},
            "vllm serve Q -ac.backend=TRITON_ATTN --attention-config.flash_attn_version 2",
        ),
        (
            """vllm serve Q --attention-config '{"backend": "FLASHINFER", "a": 1}' -tp 2""",
            {"attention_backend": "TRITON_ATTN"},
            """vllm serve Q --attention-config '{"backend": "TRITON_ATTN", "a": 1}' -tp 2""",
        ),
        (
            """vllm serve Q --attention-config '{"a": 1}'""",
            {"attention_backend": "TRITON_ATTN"},
            """vllm serve Q --attention-config '{"a": 1}' --attention-backend TRITON_ATTN""",
        ),
        ("vllm serve Q \\\n    -tp 2", {"seed": 3}, "vllm serve Q \\\n    -tp 2 \\\n    --seed 3"),
        ("vllm serve Q", {"temperature": 1.0}, "vllm serve Q"),
    ],
)
def test_a_change_leaves_the_rest_as_it_was(before: str, changes: dict[str, Value], after: str) -> None:
    assert CommandLine(before).changed(changes) == after


SECRET = "sk-very-secret-indeed-it-is"


def test_secrets_never_come_out() -> None:
    command = CommandLine(f"HF_TOKEN={SECRET} vllm serve Q --api-key {SECRET} --x-token={SECRET} --seed 1")
    assert command.changed({"seed": 2}) == (
        'HF_TOKEN="$HF_TOKEN" vllm serve Q --api-key "$VLLM_API_KEY" --x-token="$X_TOKEN" --seed 2'
    )
    assert SECRET not in str(command.read())


def test_a_secret_from_a_variable_may_stay() -> None:
    text = 'vllm serve Q --api-key "$KEY"'
    assert CommandLine(text).changed({}) == text


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("--api-key a b c", '--api-key "$VLLM_API_KEY" "$VLLM_API_KEY_2" "$VLLM_API_KEY_3"'),
        ('--api-key a "$B" c', '--api-key "$VLLM_API_KEY" "$B" "$VLLM_API_KEY_3"'),
        ("--api-key=a", '--api-key="$VLLM_API_KEY"'),
        ("--api-key '$a'", '--api-key "$VLLM_API_KEY"'),
        ("--api-key $A-b", '--api-key "$VLLM_API_KEY"'),
        ('--api-key="$A"', '--api-key="$A"'),
    ],
)
def test_as_many_keys_as_there_were(words: str, after: str) -> None:
    fixed = CommandLine(f"vllm serve Q {words} --seed 1").changed({})
    assert fixed == f"vllm serve Q {after} --seed 1"
    assert CommandLine(fixed).changed({}) == fixed


def test_a_secret_behind_an_ambiguous_flag_is_hidden() -> None:
    assert SECRET not in CommandLine(f"vllm serve Q --api {SECRET}").changed({})
    assert SECRET not in CommandLine(f"vllm serve Q --api={SECRET}").changed({})


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: Q\nlogprobs-mode: processed_logprobs\nseed: 3\nenable_prefix_caching: false\nmystery: 1\n"
    )
    command = CommandLine(f"vllm serve --config {file} --seed 4")
    reading = command.read()
    assert reading.settings["logprobs_mode"].value == "processed_logprobs"
    assert reading.settings["seed"].value == 4
    assert reading.settings["prefix_caching"].value is True
    assert reading.settings["dropped_lines"].value == "enable_prefix_caching"
    assert reading.settings["refused"].value == "--mystery is no flag of vLLM 0.32"
    assert command.typed("dropped_lines", None) == "--no-enable-prefix-caching"
    fixed = CommandLine(command.changed({"dropped_lines": None}))
    assert fixed.text.endswith("--no-enable-prefix-caching")
    assert fixed.read().settings["dropped_lines"].value is None


def test_a_file_behind_an_equals_sign_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("logprobs-mode: processed_logprobs\n")
    command = CommandLine(f"vllm serve Q --config='{file}' --seed 4")
    settings = command.read().settings
    assert settings["logprobs_mode"].origin is Origin.DEFAULT
    assert settings["ignored_config"].value == str(file)
    assert command.typed("ignored_config", None) == f"--config {file}"
    fixed = CommandLine(command.changed({"ignored_config": None}))
    assert fixed.text == f"vllm serve Q --config '{file}' --seed 4"
    assert fixed.read().settings["logprobs_mode"].value == "processed_logprobs"
    assert fixed.read().settings["ignored_config"].value is None
    assert "ignored_config" not in CommandLine("vllm serve Q").read().settings


def test_a_second_file_is_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("seed: 3\n")
    command = CommandLine(f"vllm serve Q --config=other.yaml --config {file}")
    assert command.read().settings["seed"].value == 3
    assert command.typed("ignored_config", None) == "remove --config=other.yaml"
    assert command.changed({"ignored_config": None}) == f"vllm serve Q --config {file}"


def test_words_are_taken_apart_as_a_shell_does() -> None:
    text = """a 'b c' "d \\" e" f\\ g \\\n h'i'"j" '' """
    assert [word.text for word in split(text)] == ["a", "b c", 'd " e', "f g", "hij", ""]
    assert all(text[word.start : word.end].strip() for word in split(text))


@pytest.mark.parametrize(
    ("content", "known", "expected"),
    [
        ('{"temperature": 0.6, "top_p": 1.0}', True, "temperature 0.6"),
        ('{"eos_token_id": 2}', True, None),
        (None, True, None),
        ("{", False, None),
    ],
)
def test_a_model_that_is_here_is_looked_into(
    tmp_path: Path, content: str | None, known: bool, expected: Value
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    setting = CommandLine(f"vllm serve {tmp_path}").read().settings["generation_defaults"]
    assert (setting.known, setting.value) == (known, expected)


def test_what_is_no_number_stays_text() -> None:
    assert value("vllm serve Q --max-model-len auto", "max_model_len") == "auto"
    assert value("vllm serve Q --max-model-len 1.5k", "max_model_len") == 1500


def test_an_attention_config_is_judged_by_its_backend() -> None:
    invariant = "VLLM_BATCH_INVARIANT=1 vllm serve Q --logprobs-mode processed_logprobs"
    assert diagnose(CommandLine(f"{invariant} --attention-backend triton_attn"), {})[0].exit_code == 0
    assert diagnose(CommandLine(f"{invariant} --attention-config.backend FLASHINFER"), {})[0].exit_code == 1
    listed = CommandLine("vllm serve Q --attention-config.backend FLASHINFER").read().not_judged
    assert listed == ()
    more = '{"backend": "FLASHINFER", "flash_attn_version": 2}'
    assert CommandLine(f"vllm serve Q --attention-config '{more}'").read().not_judged == (
        "--attention-config",
    )


def test_two_attention_backends_are_refused_as_vllm_refuses_them() -> None:
    both = "vllm serve Q --attention-backend TRITON_ATTN --attention-config.backend FLASHINFER"
    with pytest.raises(ConfigError, match="take one of them out"):
        CommandLine(both).read()


@pytest.mark.parametrize(
    ("written", "typed"),
    [
        ("attention-config.backend: FLASHINFER", "--attention-config.backend TRITON_ATTN"),
        (
            "attention_config: {backend: FLASHINFER, a: 1}",
            """--attention-config '{"backend": "TRITON_ATTN", "a": 1}'""",
        ),
        ("attention-config: {a: 1}", "--attention-backend TRITON_ATTN"),
    ],
)
def test_a_backend_in_the_file_is_replaced_as_vllm_lets_it(tmp_path: Path, written: str, typed: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: Q\n{written}\n")
    command = CommandLine(f"vllm serve --config {file}")
    assert command.typed("attention_backend", "TRITON_ATTN") == typed
    fixed = command.changed({"attention_backend": "TRITON_ATTN"})
    assert fixed == f"{command.text} {typed}"
    assert value(fixed, "attention_backend") == "TRITON_ATTN"


def test_a_backend_beside_that_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("attention-config: {backend: FLASHINFER}\n")
    with pytest.raises(ConfigError, match="take one of them out"):
        CommandLine(f"vllm serve Q --config {file} --attention-backend TRITON_ATTN").read()


def test_what_to_type_is_what_vllm_would_take() -> None:
    command = CommandLine("vllm serve Q --attention-config.backend FLASHINFER")
    assert command.typed("attention_backend", "TRITON_ATTN") == "--attention-config.backend TRITON_ATTN"
    assert CommandLine("vllm serve Q").typed("attention_backend", "X") == "--attention-backend X"


@pytest.mark.parametrize(
    "words",
    [
        "--speculative-config None",
        "--speculative-config null",
        "--spec-method None",
        "--kv-transfer-config None",
        "--kv-offloading-size None",
        "--watermark-config ''",
        "--host None",
        "--quantization None",
    ],
)
def test_none_is_as_if_nothing_were_said(words: str) -> None:
    """As the parser of vLLM 0.32 answers to the same words."""
    plain = diagnose(CommandLine("vllm serve Q"), {})[0]
    said = diagnose(CommandLine(f"vllm serve Q {words}"), {})[0]
    assert [finding.rule for finding in said.findings] == [finding.rule for finding in plain.findings]
    assert [row.value for row in said.settings] == [row.value for row in plain.settings]


def test_none_does_not_undo_what_another_flag_says() -> None:
    assert value("vllm serve Q --speculative-config None --spec-method ngram", "speculative") is not None


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("override-generation-config: {temperature: 1.0}", "generation_defaults", None),
        ("override-generation-config.temperature: 1.0", "generation_defaults", None),
        ("override-generation-config: {top_p: 1.0}", "generation_defaults", "temperature 0.6"),
        ("hf-config-path: {plain}", "generation_defaults", None),
        ("generation-config: {plain}", "generation_defaults", None),
        ("generation-config: auto", "generation_defaults", "temperature 0.6"),
        ("speculative-config: null", "speculative", None),
        ("kv_offloading_size: null", "kv_transfer", None),
        ("hf-overrides: {}", "hf_overrides", None),
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


def test_a_dotted_line_of_the_file_wins_over_a_json_of_the_command(tmp_path: Path) -> None:
    """All stand on one line in the end, and dotted forms go last wherever they stood."""
    file = tmp_path / "serve.yaml"
    file.write_text("hf-overrides.head_dtype: float32\n")
    assert value(f"vllm serve Q --config {file} {ROPE}", "head_dtype") == "float32"
