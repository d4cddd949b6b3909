"""Files of vLLM, TRL, PipelineRL and our own: what they mean, and what a change leaves alone."""

from pathlib import Path

import pytest

from zerodrift.config.shipped import Profile, text
from zerodrift.core.errors import ConfigError, UnknownKey
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import corrected, open_target, open_text
from zerodrift.doctor.pipelinerl_file import PipelineRlFile
from zerodrift.doctor.setting import Origin, Value
from zerodrift.doctor.target import Target
from zerodrift.doctor.trl_file import TrlFile
from zerodrift.doctor.vllm_file import VllmFile
from zerodrift.doctor.zerodrift_file import ZerodriftFile


def opened(content: str, kind: FileKind | None = None) -> Target:
    return open_text(content, "file.yaml", kind)


def value(content: str, name: str, kind: FileKind | None = None) -> Value:
    return opened(content, kind).read().settings[name].value


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("model: Q\nlogprobs-mode: raw_logprobs", VllmFile),
        ("model: Q\ndtype: bfloat16\nmax_model_len: 4096", VllmFile),
        ("use_vllm: true\nseed: 1", TrlFile),
        ("model_name_or_path: Q\nnum_generations: 8\nlearning_rate: 1e-6", TrlFile),
        ("vllm_config: {vllm_kwargs: {}}", PipelineRlFile),
        ("defaults: [base, _self_]\nllm: {parameters: {temperature: 1}}", PipelineRlFile),
        ("engine: {name: vllm}", ZerodriftFile),
    ],
)
def test_a_file_is_told_by_its_keys(content: str, kind: type) -> None:
    assert isinstance(opened(content), kind)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("weather: fine", "told by its keys; say which with --kind"),
        ("- a\n- b", "no mapping"),
        ("a: [", "not valid YAML"),
        ("seed: 1\nseed: 2", "given twice"),
        ("engine: {name: vllm, logprobs_mode: x}", "logprobs_mode"),
        ("vllm_config: {vllm_kwargs: 3}", "no mapping"),
        ("use_vllm: true\ngeneration_kwargs: 3", "no mapping"),
        ("use_vllm: true\ngeneration_kwargs: '{a'", "not JSON"),
        ("model: Q\n1: 2", "not text"),
    ],
)
def test_a_refusal_names_the_problem(content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(content).read()


def test_our_own_keys_are_checked() -> None:
    with pytest.raises(UnknownKey, match=r"engine\.logprobs_mode"):
        opened("engine: {logprob_mode: raw_logprobs}")


def test_what_is_neither_file_nor_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to judge"):
        open_target(" ")
    with pytest.raises(ConfigError, match="neither a URL"):
        open_target("localhost:8000")
    with pytest.raises(ConfigError, match="no file"):
        open_target("nowhere.yaml")
    with pytest.raises(ConfigError, match="no vLLM server command"):
        open_target("x " * 4000)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        open_target(str(binary))


def test_a_file_and_its_correction_are_opened_alike(tmp_path: Path) -> None:
    file = tmp_path / "my grpo"
    file.write_text("use_vllm: true\n")
    assert isinstance(open_target(str(file)), TrlFile)
    assert isinstance(corrected("use_vllm: true\n", str(file)), TrlFile)
    assert corrected("vllm serve Q --seed 1", "vllm serve Q").read().settings["seed"].value == 1


def test_vllm_drops_false_below_a_key_with_underscores() -> None:
    content = (
        "model: Q\nenable_prefix_caching: false # off!\nasync-scheduling: false\ntrust_remote_code: true\n"
    )
    settings = opened(content).read().settings
    assert settings["prefix_caching"].value is True
    assert settings["async_scheduling"].value is False
    assert settings["trust_remote_code"].value is True
    assert settings["dropped_lines"].value == "enable_prefix_caching"
    fixed = opened(content).changed({"dropped_lines": None})
    assert fixed == content.replace("enable_prefix_caching", "enable-prefix-caching")


def test_a_vllm_file_is_changed_in_place() -> None:
    content = (
        "# server\nmodel: Q\nlogprobs_mode: raw_logprobs  # why?\nspec_method: ngram\nhf_overrides:\n  a: 1\n"
    )
    changes: dict[str, Value] = {
        "logprobs_mode": "processed_logprobs",
        "speculative": None,
        "head_dtype": "float32",
        "prefix_caching": False,
        "batch_invariant": False,
    }
    assert opened(content).changed(changes) == (
        "# server\nmodel: Q\nlogprobs_mode: processed_logprobs  # why?\nhf_overrides:\n  a: 1\n"
        "  head_dtype: float32\nenable-prefix-caching: false\n"
    )


def test_what_to_type_into_a_vllm_file() -> None:
    file = opened("model: Q\nlora-modules: [a, b]\nenable-lora: true\ncpu-offload-params: []\n")
    assert file.typed("prefix_caching", value=False) == "enable-prefix-caching: false"
    assert file.typed("head_dtype", "float32") == "hf-overrides: {head_dtype: float32}"
    assert file.typed("batch_invariant", value=True) == "VLLM_BATCH_INVARIANT=1 before the command"
    assert file.typed("quantization", None) == "remove quantization"
    assert file.typed("temperature", 1.0) is None
    assert file.typed("dropped_lines", None) is None
    assert file.read().settings["lora"].value is True


def test_trl_starts_vllm_with_settings_of_its_own() -> None:
    settings = opened("use_vllm: true").read().settings
    assert settings["logprobs_mode"].origin is Origin.FRAMEWORK
    assert settings["correction_mode"].value == "sequence_mask"
    assert settings["trainer_dtype"].value == "bfloat16"
    assert "lora_dropout" not in settings


def test_trl_without_vllm_has_no_engine_to_judge() -> None:
    settings = opened("num_generations: 8").read().settings
    assert "correction" not in settings
    assert "logprobs_mode" not in settings
    assert settings["rollouts"].value == "transformers in the trainer"


def test_trl_with_a_server_does_not_know_it() -> None:
    settings = opened("use_vllm: true\nvllm_mode: server").read().settings
    assert "logprobs_mode" not in settings
    assert settings["cache_reset"].value == "answer not read"


def test_generation_kwargs_reach_the_sampler_alone() -> None:
    content = (
        'use_vllm: true\ntemperature: 0.9\ngeneration_kwargs: \'{"temperature": 0.7, "presence_penalty": 1}\''
    )
    settings = opened(content).read().settings
    assert settings["temperature"].value == 0.7
    assert settings["trainer_temperature"].value == 0.9
    assert settings["presence_penalty"].value == 1


def test_what_generation_kwargs_hold_is_changed_there() -> None:
    content = "use_vllm: true\ntop_p: 1.0\ngeneration_kwargs:\n  top_p: 0.9\n"
    assert opened(content).changed({"top_p": 1.0}) == content.replace("0.9", "1.0")


@pytest.mark.parametrize(
    ("line", "expected"), [("fp16: true", "float16"), ("bf16: false", "float32"), ("bf16: true", "bfloat16")]
)
def test_precision_of_trl(line: str, expected: str) -> None:
    assert value(f"use_vllm: true\n{line}", "trainer_dtype") == expected


def test_what_to_type_into_a_trl_file() -> None:
    file = opened("use_vllm: true\nreport_to: wandb\ntemperature: '0.7'\nmin_p: null")
    assert file.typed("trainer_head_dtype", "model") == "cast_lm_head_to_fp32: false"
    assert file.typed("max_model_len", None) == "remove vllm_max_model_length"
    assert file.typed("prefix_caching", value=False) is None
    assert file.read().not_judged == ("report_to",)
    assert file.read().settings["temperature"].value == 0.7
    assert file.read().settings["min_p"].value == 0.0


def test_pipelinerl_falls_back_to_its_base() -> None:
    settings = opened("defaults: [base]").read().settings
    assert settings["prefix_caching"].value is False
    assert settings["head_dtype"].origin is Origin.FRAMEWORK
    assert settings["trainer_temperature"].value == 1.0
    assert settings["stream"].value == "files"


def test_pipelinerl_hands_its_flags_to_vllm() -> None:
    content = "vllm_config:\n  vllm_kwargs:\n    enable-prefix-caching: true\n    enforce-eager: ''\n    max-num-seqs: 4\n"
    settings = opened(content).read().settings
    assert settings["prefix_caching"].value is True
    assert settings["enforce_eager"].value is True
    assert opened(content).read().not_judged == ("--max-num-seqs",)
    assert opened(content).changed({"prefix_caching": False, "async_scheduling": False, "host": "x"}) == (
        content.replace("caching: true", "caching: false") + "    async-scheduling: false\n"
    )


def test_a_flag_between_braces_is_taken_out_alone() -> None:
    content = (
        "vllm_config:\n  vllm_kwargs: {dtype: bfloat16, generation-config: auto, "
        'speculative-config: \'{"method": "ngram"}\', max-num-seqs: 64}\n'
    )
    assert opened(content).changed({"generation_config": "vllm", "speculative": None}) == (
        "vllm_config:\n  vllm_kwargs: {dtype: bfloat16, generation-config: vllm, max-num-seqs: 64}\n"
    )


def test_interpolations_are_followed_or_unknown() -> None:
    content = (
        "llm: {parameters: {temperature: 0.7}}\nmax_lag: ${elsewhere}\n"
        "finetune: {rl: {temperature: '${...llm.parameters.temperature}'}}\n"
        "vllm_config: {vllm_kwargs: {dtype: '${somewhere}'}}\n"
    )
    settings = opened(content).read().settings
    assert settings["trainer_temperature"].value == 0.7
    assert not settings["max_lag"].known
    assert not settings["dtype"].known


@pytest.mark.parametrize(
    ("sampler", "trainer", "expected"),
    [
        ("temperature: 0.7", "${..llm.parameters.temperature}", (0.7, Origin.SET)),
        ("temperature: 0.7", "${llm.parameters.temperature}", (0.7, Origin.SET)),
        ("temperature: 0.7", "${...parameters.temperature}", (0.7, Origin.SET)),
        ("top_p: 1.0", "${..llm.parameters.temperature}", (1.0, Origin.DEFAULT)),
        # What is not known here does not become known by being pointed at.
        ("temperature: '${oc.env:TEMP}'", "${..llm.parameters.temperature}", (None, Origin.UNKNOWN)),
        # Keys are matched whole.
        ("temperature: 0.7", "${..ature}", (None, Origin.UNKNOWN)),
        ("temperature: 0.7", "${}", (None, Origin.UNKNOWN)),
    ],
)
def test_an_interpolation_is_what_it_points_at(
    sampler: str, trainer: str, expected: tuple[Value, Origin]
) -> None:
    content = f"llm: {{parameters: {{{sampler}}}}}\nfinetune: {{rl: {{temperature: '{trainer}'}}}}\n"
    setting = opened(content).read().settings["trainer_temperature"]
    assert setting.name == "trainer_temperature"
    assert (setting.value, setting.origin) == expected


def test_a_stream_among_the_defaults() -> None:
    assert value("defaults:\n  - base\n  - streams: redis\n", "stream") == "redis"


def test_what_to_type_for_pipelinerl() -> None:
    file = opened("defaults: [base]\nvllm_config: {vllm_kwargs: null}\n")
    assert file.typed("prefix_caching", value=False) == "vllm_config.vllm_kwargs.enable-prefix-caching=false"
    assert file.typed("kl_coef", 0.0) == "finetune.rl.kl_coef=0.0"
    assert file.typed("attention_backend", None) == "remove vllm_config.vllm_kwargs.attention-backend"
    assert file.typed("head_dtype", "float32") is None
    assert file.typed("batch_invariant", value=True) is None
    assert file.typed("stream", "files") is None
    assert file.changed({"prefix_caching": False, "stream": "files"}).endswith(
        "vllm_config: {vllm_kwargs: {enable-prefix-caching: false}}\n"
    )
    removed = opened(
        "vllm_config:\n  vllm_kwargs:\n    quantization: fp8\n    seed: 1\n    attention_backend: X\n"
    )
    assert "attention" not in removed.changed({"attention_backend": None})


@pytest.mark.parametrize(
    ("profile", "code"), [(Profile.RL_TRAINING, 0), (Profile.LONG_CONTEXT, 0), (Profile.SERVING, 1)]
)
def test_our_own_profiles(profile: Profile, code: int) -> None:
    """What we ship for RL has nothing wrong; what we ship for serving is not for RL, and says so."""
    assert diagnose(opened(text(profile)), {})[0].exit_code == code


def test_our_own_file_in_parts() -> None:
    started = "engine:\n  name: vllm\n  args: ['--quantization', 'fp8', '--block-size', '16']\n  env: {VLLM_BATCH_INVARIANT: '1'}\n"
    reading = opened(started).read()
    assert reading.settings["quantization"].value == "fp8"
    assert reading.settings["batch_invariant"].value is True
    assert reading.settings["host"].value == "127.0.0.1"
    assert reading.settings["prefix_caching"].origin is Origin.DEFAULT
    assert reading.not_judged == ("--block-size",)
    assert opened(started).typed("head_dtype", "model") == "engine.head_dtype=auto"
    assert opened(started).typed("quantization", None) is None
    running = opened("engine: {name: vllm, url: 'http://x:1'}").read()
    assert "logprobs_mode" not in running.settings
    assert running.not_judged == ("engine.url: ask it with zerodrift doctor http://x:1",)
    assert opened("engine: {name: exact}").read().not_judged == ("engine.name: exact",)
    assert opened("engine:\n  name: vllm\n").changed({"prefix_caching": False}) == (
        "engine:\n  name: vllm\n  enable_prefix_caching: false\n"
    )


def test_our_own_file_is_refused_where_one_of_two_overrides_would_be_lost() -> None:
    content = "engine: {name: vllm, head_dtype: float32, args: ['--hf-overrides.rope_theta', '1']}"
    with pytest.raises(ConfigError, match=r"engine\.head_dtype"):
        opened(content).read()


def test_structures_are_named_by_what_they_hold() -> None:
    content = (
        "use_vllm: true\nvllm_structured_outputs_regex: {a: 1, b: 2}\nvllm_importance_sampling_mode: [x, y]"
    )
    settings = opened(content).read().settings
    assert settings["structured_outputs"].value == "a, b"
    assert settings["correction_mode"].value == "x, y"


@pytest.mark.parametrize("engine", ["exact", "reference", "sglang"])
@pytest.mark.parametrize(
    ("mode", "temperature", "code"),
    [("raw_logprobs", 0.7, 1), ("raw_logprobs", 1.0, 0), ("processed_logprobs", 0.7, 0)],
)
def test_our_own_file_means_its_logprobs_whatever_the_engine(
    engine: str, mode: str, temperature: float, code: int
) -> None:
    content = f"engine: {{name: {engine}, logprobs_mode: {mode}}}\nsampling_defaults: {{temperature: {temperature}}}\n"
    assert value(content, "logprobs_mode") == mode
    assert diagnose(opened(content), {})[0].exit_code == code
    fixed = opened(content).changed({"logprobs_mode": "processed_logprobs"})
    assert diagnose(opened(fixed), {})[0].exit_code == 0


def test_a_switch_in_quotes_is_a_switch() -> None:
    """TRL reads its file as defaults of a command line, where text is converted."""
    content = 'use_vllm: true\nvllm_importance_sampling_correction: "{}"\n'
    assert value(content.format("false"), "correction") is False
    assert value(content.format("True"), "correction") is True
    found = diagnose(opened(content.format("false")), {})[0].findings
    assert "no-correction" in {finding.rule for finding in found}


def test_generation_kwargs_in_quotes_are_judged() -> None:
    content = "use_vllm: true\ngeneration_kwargs: '{\"top_p\": 0.9}'\n"
    assert value(content, "top_p") == 0.9
    fixed = opened(content).changed({"top_p": 1.0})
    assert fixed == content.replace("0.9", "1.0")


@pytest.mark.parametrize(
    "content",
    [
        "attention-config: {backend: FLASHINFER, a: 1}\n",
        "attention_config:\n  backend: FLASHINFER # why?\n",
        "attention-config.backend: FLASHINFER\n",
        'attention-config: \'{"backend": "FLASHINFER"}\'\n',
        "attention-backend: FLASHINFER\n",
    ],
)
def test_a_backend_is_changed_where_it_stands(content: str) -> None:
    content = f"model: Q\n{content}"
    assert value(content, "attention_backend") == "FLASHINFER"
    fixed = opened(content).changed({"attention_backend": "TRITON_ATTN"})
    assert fixed == content.replace("FLASHINFER", "TRITON_ATTN")


def test_what_to_type_for_a_backend_in_a_section() -> None:
    file = opened("model: Q\nattention-config: {backend: FLASHINFER}\n")
    assert file.typed("attention_backend", "X") == "attention-config: {backend: X}"
    assert opened("model: Q\nseed: 1\n").typed("attention_backend", "X") == "attention-backend: X"
