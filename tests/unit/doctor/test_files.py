"""Files of vLLM, TRL, PipelineRL and our own: what they mean, and what a correction leaves alone."""

import pytest

from zerodrift.config.shipped import Profile, text
from zerodrift.core.errors import ConfigError, UnknownKey
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.open_target import open_target, open_text
from zerodrift.doctor.setting import FileKind, Origin, Setting, Target, Value
from zerodrift.doctor.table_files import ASK, SkyRlFile, VerlFile
from zerodrift.doctor.trainer_files import PipelineRlFile, TrlFile
from zerodrift.doctor.vllm_file import VllmFile
from zerodrift.doctor.yaml_text import YamlText
from zerodrift.doctor.zerodrift_file import ZerodriftFile

ABSENT, UNKNOWN = "absent", "unknown"
POINTING = "llm: {{parameters: {{{}}}}}\nfinetune: {{rl: {{temperature: '{}'}}}}\n"


def opened(content: str, kind: FileKind | None = None) -> Target:
    return open_text(content, "file.yaml", kind)


def value(content: str, name: str) -> Value:
    setting = opened(content).read().settings.get(name)
    return ABSENT if setting is None else setting.value if setting.known else UNKNOWN


def exit_code(content: str) -> int:
    return diagnose(opened(content), {})[0].exit_code


@pytest.mark.parametrize("written", [".nan", ".inf", "-.inf"])
def test_what_is_no_number_is_refused(written):
    """NaN differs from itself: it was told to be NaN instead."""
    with pytest.raises(ConfigError, match="temperature is"):
        exit_code(f"use_vllm: true\nnum_generations: 8\ntemperature: {written}")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("model: Q\nlogprobs-mode: raw_logprobs", VllmFile),
        ("model: Q\ndtype: bfloat16\nmax_model_len: 4096", VllmFile),
        ("use_vllm: true\nseed: 1", TrlFile),
        ("model_name_or_path: Q\nnum_generations: 8\nlearning_rate: 1e-6", TrlFile),
        ("vllm_config: {vllm_kwargs: {}}", PipelineRlFile),
        ("defaults: [base, _self_]\nllm: {parameters: {temperature: 1}}", PipelineRlFile),
        ("actor_rollout_ref: {rollout: {name: vllm}}", VerlFile),
        ("defaults: [ppo_trainer]\nactor_rollout_ref: {rollout: {}}", VerlFile),
        ("generator: {sampling_params: {}}\ntrainer: {seed: 1}", SkyRlFile),
        ("engine: {name: vllm}", ZerodriftFile),
    ],
)
def test_a_file_is_told_by_its_keys(content, kind):
    assert isinstance(opened(content), kind)


@pytest.mark.parametrize(
    "content",
    [
        *("weather: fine", "- a\n- b", "a: [", "seed: 1\nseed: 2", "model: Q\n1: 2"),
        "engine: {name: vllm, logprobs_mode: x}",
        "engine: {name: vllm, head_dtype: float32, args: ['--hf-overrides.rope_theta', '1']}",
        "vllm_config: {vllm_kwargs: 3}",
        *("use_vllm: true\ngeneration_kwargs: 3", "use_vllm: true\ngeneration_kwargs: '{a'"),
    ],
)
def test_what_cannot_be_read_is_refused(content):
    with pytest.raises(ConfigError):
        opened(content).read()


def test_what_is_neither_file_nor_command_is_refused(tmp_path):
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for target in (" ", "localhost:8000", "nowhere.yaml", "x " * 4000, str(binary)):
        with pytest.raises(ConfigError):
            open_target(target)
    with pytest.raises(UnknownKey):
        opened("engine: {logprob_mode: raw_logprobs}")


def test_a_file_may_be_called_anything_and_a_script_is_a_command(tmp_path):
    (tmp_path / "my grpo").write_text("use_vllm: true\n")
    (tmp_path / "serve.sh").write_text("#!/bin/sh\nA=1 exec vllm serve Q\n")
    assert isinstance(open_target(str(tmp_path / "my grpo")), TrlFile)
    assert isinstance(open_target(str(tmp_path / "serve.sh")), CommandLine)


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        # vLLM drops `false` below a key with underscores.
        ("model: Q\nenable_prefix_caching: false", "prefix_caching", True),
        ("model: Q\nenable_prefix_caching: no", "dropped_lines", "enable_prefix_caching"),
        ("model: Q\nasync-scheduling: off", "async_scheduling", False),
        ("model: Q\ntrust_remote_code: true\nlora-modules: [a, b]", "trust_remote_code", True),
        ("model: Q\nquantization: null", "refused", None),
        ("model: Q\nhf-overrides: {day: 2026-01-01}", "hf_overrides", "day"),
        ("model: Q\nmax-logprobs: -1\ndtype: false\ncpu-offload-params: []", "refused", None),
        # TRL starts vLLM with settings of its own, or does not know the server's.
        ("use_vllm: true", "logprobs_mode", "processed_logprobs"),
        ("use_vllm: true", "lora_dropout", ABSENT),
        ("num_generations: 8", "logprobs_mode", ABSENT),
        ("num_generations: 8", "rollouts", "transformers in the trainer"),
        ("use_vllm: true\nvllm_mode: server", "logprobs_mode", ABSENT),
        ("use_vllm: true\nvllm_mode: server", "cache_reset", "answer not read"),
        ("use_vllm: true\nfp16: true", "trainer_dtype", "float16"),
        ("use_vllm: true\nbf16: false", "trainer_dtype", "float32"),
        ("use_vllm: true\ntemperature: '0.7'", "temperature", 0.7),
        ("use_vllm: true\nmin_p: null", "min_p", 0.0),
        # TRL reads its file as defaults of a command line, where text is converted.
        ('use_vllm: true\nvllm_importance_sampling_correction: "false"', "correction", False),
        ("use_vllm: true\nvllm_structured_outputs_regex: {a: 1, b: 2}", "structured_outputs", "a, b"),
        # generation_kwargs reach the sampler alone.
        ("use_vllm: true\ngeneration_kwargs: '{\"temperature\": 0.7}'", "temperature", 0.7),
        ("use_vllm: true\ngeneration_kwargs: {temperature: 0.7}", "trainer_temperature", 1.0),
        ("use_vllm: true\ngeneration_kwargs: {presence_penalty: 1}", "presence_penalty", 1),
        ("defaults: [base]", "prefix_caching", False),
        ("defaults: [base]", "head_dtype", "float32"),
        ("defaults:\n  - base\n  - streams: redis\n", "stream", "redis"),
        ("vllm_config: {vllm_kwargs: {enable-prefix-caching: true}}", "prefix_caching", True),
        ("vllm_config: {vllm_kwargs: {enable-prefix-caching: 'false'}}", "prefix_caching", False),
        ("vllm_config: {vllm_kwargs: {enforce-eager: ''}}", "enforce_eager", True),
        ("vllm_config: {vllm_kwargs: {dtype: '${somewhere}'}}", "dtype", UNKNOWN),
        ("defaults: [base]\nmax_lag: ${elsewhere}", "max_lag", UNKNOWN),
        # An interpolation is what it points at, as far as that is known; keys are matched whole.
        (POINTING.format("temperature: 0.7", "${..llm.parameters.temperature}"), "trainer_temperature", 0.7),
        (POINTING.format("top_p: 1.0", "${..llm.parameters.temperature}"), "trainer_temperature", 1.0),
        (POINTING.format("temperature: '${oc.env:T}'", "${..temperature}"), "trainer_temperature", UNKNOWN),
        (POINTING.format("temperature: 0.7", "${..ature}"), "trainer_temperature", UNKNOWN),
        ("engine: {name: vllm, args: ['-q', fp8]}", "quantization", "fp8"),
        ("engine: {name: vllm, env: {VLLM_BATCH_INVARIANT: '1'}}", "batch_invariant", True),
        ("engine: {name: vllm, env: {VLLM_SERVER_DEV_MODE: 'true'}}", "dev_mode", UNKNOWN),
        ("engine: {name: vllm}", "host", "127.0.0.1"),
        ("engine: {name: vllm, url: 'http://x:1'}", "logprobs_mode", ABSENT),
        ("engine: {name: exact, logprobs_mode: raw_logprobs}", "logprobs_mode", "raw_logprobs"),
    ],
)
def test_what_a_file_means(content, name, expected):
    assert value(content, name) == expected


@pytest.mark.parametrize(
    "line", ['enable-lora: "false"', "async-scheduling: 0", "max-logprobs: null", "logprob-mode: raw_logits"]
)
def test_lines_that_vllm_refuses(line):
    assert value(f"model: Q\n{line}\n", "refused") is not None
    assert exit_code(f"model: Q\n{line}\n") == 1


@pytest.mark.parametrize(
    ("key", "meant"), [("temprature", "temperature"), ("top_pp", "top_p"), ("response_length", None)]
)
def test_a_key_of_verl_that_nobody_reads_may_be_a_slip(key, meant):
    (line,) = (
        each
        for each in opened(f"actor_rollout_ref: {{rollout: {{{key}: 1}}}}").read().not_judged
        if key in each
    )
    assert ("did you mean" in line) is (meant is not None)
    assert meant is None or line.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("content", "listed"),
    [
        ("model: Q\nblock-size: 8\ndtype: false", ("--block-size", "dtype: false, which vLLM drops")),
        ("use_vllm: true\nreport_to: wandb", ("report_to",)),
        ("vllm_config: {vllm_kwargs: {max-num-seqs: 4}}\nworld: 1", ("--max-num-seqs", "world")),
        ("engine: {name: vllm, args: ['--block-size', '16']}", ("--block-size",)),
        ("engine: {name: exact}", ("engine.name: exact",)),
    ],
)
def test_what_is_not_judged_is_listed(content, listed):
    assert opened(content).read().not_judged == listed


@pytest.mark.parametrize("asks", [True, False])
def test_a_server_that_nobody_asks_is_named(asks):
    told, _ = diagnose(opened("engine: {name: vllm, url: 'http://x:1'}"), {}, asks_server=asks)
    assert (told.not_judged == ()) is asks
    assert any("http://x:1" in line for line in told.not_judged) is not asks


def test_settings_beside_a_server_that_runs_are_named_as_not_its_own():
    told, _ = diagnose(opened("engine: {name: vllm, url: 'http://x:1', logprobs_mode: raw_logprobs}"), {})
    assert told.not_judged[0].startswith("engine.logprobs_mode: ")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (text(Profile.RL_TRAINING), 0),
        (text(Profile.LONG_CONTEXT), 0),
        (text(Profile.SERVING), 1),  # not for RL, and says so
        ("engine: {name: exact, logprobs_mode: raw_logprobs}\nsampling_defaults: {temperature: 0.7}", 1),
        ("engine: {name: sglang, logprobs_mode: processed_logprobs}\nsampling_defaults: {temperature: 2}", 0),
        # The server has settings of its own, and was not asked.
        ("engine: {name: vllm, url: 'http://x:1', kv_cache_dtype: fp8}", 3),
        ("engine: {name: vllm, args: ['--logprobs-mode', raw]}", 1),
        ("use_vllm: true\nvllm_importance_sampling_correction: 'false'", 0),
    ],
)
def test_exit_codes(content, code):
    assert exit_code(content) == code


def test_a_server_that_was_asked_is_not_left_open():
    target = opened("engine: {name: vllm, url: 'http://x:1'}")
    asked = {"running_server": Setting("running_server", None, Origin.ASKED)}
    assert diagnose(target, asked)[0].exit_code == 0


@pytest.mark.parametrize(
    ("content", "name", "new", "typed"),
    [
        ("model: Q", "prefix_caching", False, "enable-prefix-caching: false"),
        ("model: Q", "head_dtype", "float32", "hf-overrides: {head_dtype: float32}"),
        ("model: Q", "mkl_cbwr", "AVX2", "MKL_CBWR=AVX2 before the command"),
        ("model: Q", "temperature", 1.0, None),
        ("model: Q\nattention-config.backend: X", "attention_backend", "Y", "attention-config: {backend: Y}"),
        ("use_vllm: true", "trainer_head_dtype", "model", "cast_lm_head_to_fp32: false"),
        ("use_vllm: true", "max_model_len", None, "remove vllm_max_model_length"),
        ("use_vllm: true", "prefix_caching", False, None),
        ("defaults: [base]", "prefix_caching", False, "vllm_config.vllm_kwargs.enable-prefix-caching=false"),
        ("defaults: [base]", "kl_coef", 0.0, "finetune.rl.kl_coef=0.0"),
        ("defaults: [base]", "attention_backend", None, "remove vllm_config.vllm_kwargs.attention-backend"),
        ("defaults: [base]", "head_dtype", "float32", None),
        ("defaults: [base]", "batch_invariant", True, None),
        ("engine: {name: vllm}", "head_dtype", "model", "engine.head_dtype=auto"),
    ],
)
def test_what_to_type(content, name, new, typed):
    assert opened(content).typed(name, new) == typed


@pytest.mark.parametrize(
    ("before", "changes", "old", "new"),
    [
        ("# a\nmodel: Q\nseed: 1  # why?\n# behind\n", {"seed": 2, "mkl_cbwr": "X"}, "1  #", "2  #"),
        ("model: Q\nspec_method: ngram\nseed: 1\n", {"speculative": None}, "spec_method: ngram\n", ""),
        ("model: Q\nenable_lora: false # off!\n", {"dropped_lines": None}, "enable_lora", "enable-lora"),
        ("model: Q\nenable_lora: true\n", {"lora": False}, "enable_lora: true", "enable-lora: false"),
        ("model: Q\nenable-lora: no\n", {"seed": 1}, "no\n", "no\nseed: 1\n"),
        ("model: Q\nhf-overrides: {a: 1}\n", {"head_dtype": "x"}, "", ""),
        ("use_vllm: true\ntop_p: 1.0\ngeneration_kwargs:\n  top_p: 0.9\n", {"top_p": 1.0}, "0.9", "1.0"),
        ("use_vllm: true\nload_in_8bit: true\n", {"trainer_quantised": False}, "8bit: true", "8bit: false"),
        (
            "actor: {}\nvllm_config:\n  vllm_kwargs: {generation-config: a, seed: 1}\n",
            {"generation_config": "b", "host": "x", "stream": "files"},
            ": a",
            ": b",
        ),
        (
            "defaults:\n  - base\nvllm_config: {vllm_kwargs: null}\n",
            {"lora": False},
            "null",
            "{enable-lora: false}",
        ),
        (
            "engine:\n  name: vllm\n",
            {"prefix_caching": False},
            "vllm\n",
            "vllm\n  enable_prefix_caching: false\n",
        ),
    ],
)
def test_a_change_leaves_the_rest_as_it_was(before, changes, old, new):
    corrected = opened(before).corrected(changes)
    assert corrected is not None
    assert corrected.printed() == before.replace(old, new)


@pytest.mark.parametrize(
    ("content", "changes"),
    [
        ("model: Q\nspec_method: ngram # fast\n", {"speculative": None}),
        ("llm: &x {parameters: {top_p: 0.9}}\nfinetune: *x\n", {"top_p": 1.0}),
        ("x: &x {top_p: 0.9}\nllm:\n  parameters:\n    <<: *x\n    top_k: 1\nactor: {}\n", {"top_p": None}),
        ("model: Q\nasync_scheduling: false\nasync-scheduling: true\n", {"dropped_lines": None}),
    ],
)
def test_what_would_change_something_else_too_is_left_to_its_owner(content, changes):
    assert opened(content).corrected(changes) is None


@pytest.mark.parametrize(
    ("content", "typed"),
    [
        ("actor_rollout_ref: {rollout: {name: sglang, top_k: 20}}\n", "actor_rollout_ref.rollout.top_k=-1"),
        (
            "trainer: {seed: 1}\ngenerator: {sampling_params: {top_k: 20}}\n",
            "generator.sampling_params.top_k=-1",
        ),
        ("use_vllm: true\ntop_k: 20\n", "top_k: 0"),
    ],
    ids=["verl", "skyrl", "trl"],
)
def test_truncation_is_turned_off_in_the_words_of_the_framework(content, typed):
    """SGLang refuses a top-k of 0, and verl's and SkyRL's files have -1."""
    target = opened(content)
    assert target.typed("top_k", 0) == typed
    corrected = target.corrected({"top_k": 0})
    assert corrected is not None
    assert corrected.printed() == content.replace("20", typed.split()[-1].split("=")[-1])


def test_text_that_looks_like_something_else_is_quoted():
    changed = YamlText("a: 1\nb: .nan\n", "f").with_values({("a",): "true", ("c", "d"): 1}, {})
    assert changed is not None
    assert (changed.values["a"], changed.values["c"]) == ("true", {"d": 1})


VERL = "actor_rollout_ref: {{rollout: {{{}}}}}\n"
SKYRL = "trainer: {{seed: 1}}\ngenerator: {{{}}}\n"


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        # Defaults of verl, not of vLLM.
        (VERL.format("name: vllm"), "logprobs_mode", "processed_logprobs"),
        (VERL.format("name: vllm"), "tensor_parallel_size", 2),
        (VERL.format("name: vllm"), "cache_reset", "the KV cache is freed after every generation"),
        (VERL.format("free_cache_engine: false"), "cache_reset", ABSENT),
        (VERL.format("temperature: 0.7"), "trainer_temperature", 0.7),
        (VERL.format("name: vllm"), "top_k", -1),
        (VERL.format("top_k: 50"), "top_k", 50),
        (VERL.format("top_p: '${elsewhere}'"), "top_p", UNKNOWN),
        (VERL.format("max_model_len: null"), "max_model_len", UNKNOWN),
        (VERL.format("engine_kwargs: {vllm: {kv_cache_dtype: fp8}}"), "kv_cache_dtype", "fp8"),
        (VERL.format("engine_kwargs: {vllm: {enable_prefix_caching: false}}"), "prefix_caching", False),
        # What verl may set by itself is not taken for vLLM's default.
        (VERL.format("name: vllm"), "generation_config", ABSENT),
        (VERL.format("name: sglang"), "logprobs_mode", ABSENT),
        (VERL.format("name: sglang, temperature: 0.7"), "temperature", 0.7),
        (SKYRL.format("sampling_params: {top_p: 0.9}"), "top_p", 0.9),
        (SKYRL.format("sampling_params: {}"), "prefix_caching", True),
        (SKYRL.format("sampling_params: {}"), "cache_reset", "salted by weight version"),
        (SKYRL.format("use_cache_salt: false"), "cache_reset", ABSENT),
        (
            SKYRL.format("inference_engine: {engine_init_kwargs: {logprobs_mode: raw_logprobs}}"),
            "logprobs_mode",
            "raw_logprobs",
        ),
        (
            SKYRL.format("inference_engine: {engine_init_kwargs: {tensor_parallel_size: 4}}"),
            "tensor_parallel_size",
            4,
        ),
        (
            SKYRL.format("inference_engine: {engine_init_kwargs: {hf_overrides: {rope_theta: 1}}}"),
            "hf_overrides",
            "rope_theta",
        ),
    ],
)
def test_settings_of_verl_and_skyrl_by_their_tables(content, name, expected):
    assert value(content, name) == expected


def test_keys_that_no_table_names_are_said_to_be_unread():
    content = (
        "actor_rollout_ref:\n  rollout: {name: sglang, top_p: 0.9, n: 8, agent: {num_workers: 8}}\n"
        "  actor: {fsdp_config: {dtype: float16}, ppo_epochs: 2}\nalgorithm: {gamma: 1}\n"
    )
    *unread, engine, ask = opened(content).read().not_judged
    assert unread == [
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.agent",
        "actor_rollout_ref.actor.ppo_epochs",
        "algorithm",
    ]
    assert engine.startswith("actor_rollout_ref.rollout.name: sglang")
    assert ask == ASK
    with pytest.raises(ConfigError):
        opened("actor_rollout_ref: {rollout: {engine_kwargs: {vllm: 3}}}")


def test_a_file_of_verl_is_judged_and_corrected():
    content = (
        "actor_rollout_ref:\n  rollout:\n    name: vllm  # as always\n    top_p: 0.9\n    temperature: 0.7\n"
    )
    assert exit_code(content) == 1
    diagnosis, _ = diagnose(opened(content), {})
    corrected = opened(content).corrected({"top_p": 1.0, "kv_cache_dtype": "auto"})
    assert corrected is not None
    assert diagnosis.exit_code == 1
    assert corrected.read().settings["top_p"] == Setting("top_p", 1.0, Origin.SET)
    assert "# as always" in corrected.printed()
    assert opened(content).typed("top_p", 1.0) == "actor_rollout_ref.rollout.top_p=1.0"


LAUNCH = """#!/bin/sh
set -x
T=0.7
# python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.top_k=9
python3 -m verl.trainer.main_ppo --config-name=ppo \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.top_p=0.9 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8 \\
    actor_rollout_ref.rollout.temperature=$T \\
    trainer.logger='["console"]' "$@"
"""


def test_a_launch_line_is_read_as_the_file_that_its_overrides_make(tmp_path):
    (tmp_path / "train.sh").write_text(LAUNCH)
    target = open_target(str(tmp_path / "train.sh"))
    reading = target.read()
    found = {name: each.value if each.known else UNKNOWN for name, each in reading.settings.items()}
    assert (found["top_p"], found["top_k"], found["kv_cache_dtype"]) == (0.9, -1, "fp8")
    assert found["temperature"] == found["trainer_temperature"] == UNKNOWN
    assert {"trainer", "--config-name=ppo", "$@"} <= set(reading.not_judged)
    assert target.typed("top_p", 1.0) == "actor_rollout_ref.rollout.top_p=1.0"
    assert target.corrected({"top_p": 1.0}) is None
    assert diagnose(target, {})[0].exit_code == 1


@pytest.mark.parametrize(
    ("command", "top_p"),
    [
        ("uv run --extra fsdp -m skyrl.train.entrypoints.main_base generator.sampling_params.top_p=0.9", 0.9),
        ("python -m skyrl.train.entrypoints.main_base trainer.seed=1", 1.0),
    ],
)
def test_a_launch_of_skyrl(command, top_p):
    assert open_target(command).read().settings["top_p"].value == top_p


@pytest.mark.parametrize(
    "command",
    [
        "python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2",
        "python -m verl.trainer.main_ppo a=1 a.b=2",
        "python -m verl.trainer.main_ppo a='1",
        'bash -c "python -m verl.trainer.main_ppo a=1"',
        "python -m verl.trainer.main_sft a=1",
    ],
)
def test_a_launch_that_cannot_be_read_is_refused(command):
    with pytest.raises(ConfigError):
        open_target(command).read()


OPENRLHF = """#!/bin/bash
ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
    --vllm.num_engines 4 --vllm.enable_prefix_caching --rollout.top_p 0.9 --rollout.temperature=$T \\
    --algo.advantage.is_correction_threshold 0.5 5.0 --data.max_len 4096 $MORE
"""


def test_a_launch_of_openrlhf_is_read_by_its_flags(tmp_path):
    (tmp_path / "train.sh").write_text(OPENRLHF)
    target = open_target(str(tmp_path / "train.sh"))
    reading = target.read()
    found = {name: each.value if each.known else UNKNOWN for name, each in reading.settings.items()}
    assert (found["top_p"], found["prefix_caching"], found["max_model_len"]) == (0.9, True, 4096)
    assert found["temperature"] == found["trainer_temperature"] == UNKNOWN
    assert (found["cache_reset"], found["dtype"], found["correction"]) == (
        "with every update",
        "bfloat16",
        False,
    )
    assert {"$MORE", "vllm.num_engines", "algo.advantage.is_correction_threshold"} <= set(reading.not_judged)
    assert target.typed("top_p", 1.0) == "--rollout.top_p 1.0"
    assert target.typed("correction", value=True) == "--algo.advantage.is_correction_enable"
    assert target.typed("sleep_mode", value=False) == "remove --vllm.enable_sleep"
    assert diagnose(target, {})[0].exit_code == 1


def test_logprobs_that_openrlhf_does_not_ask_for_have_no_mode() -> None:
    launch = "python -m openrlhf.cli.train_ppo_ray --rollout.temperature 0.7"
    without = open_target(launch).read().settings
    assert not {"logprobs_mode", "correction_mode"} & without.keys()
    corrected = open_target(f"{launch} --algo.advantage.is_correction_enable").read().settings
    assert corrected["logprobs_mode"].value == "processed_logprobs"
    assert corrected["correction_mode"].value == "token_truncate"
    assert diagnose(open_target(f"{launch} --algo.advantage.is_correction_enable"), {})[0].exit_code == 0


def test_flags_of_an_older_openrlhf_are_refused() -> None:
    with pytest.raises(ConfigError):
        open_target("python -m openrlhf.cli.train_ppo_ray --pretrain Q --temperature 0.7").read()


def test_trl_vllm_serve_is_the_vllm_serve_that_it_becomes() -> None:
    target = open_target(
        "trl vllm-serve --model Q --enable_prefix_caching false --vllm_model_impl=vllm --dtype float16"
    )
    found = {name: each.value for name, each in target.read().settings.items()}
    assert (found["logprobs_mode"], found["prefix_caching"]) == ("processed_logprobs", False)
    assert (found["dtype"], found["host"], found["refused"]) == ("float16", "0.0.0.0", None)
    # As the command that TRL advises to type instead.
    assert target.printed().startswith(
        "VLLM_SERVER_DEV_MODE=1 vllm serve Q --host 0.0.0.0 --weight-transfer-config "
    )
    # What is handed on behind its own arguments wins.
    own = open_target("trl vllm-serve --model Q --logprobs-mode raw_logprobs --enforce_eager").read().settings
    assert (own["logprobs_mode"].value, own["enforce_eager"].value) == ("raw_logprobs", True)


@pytest.mark.parametrize(
    "command",
    ["trl vllm-serve --dtype auto", "trl vllm-serve --model", "trl vllm-serve --config a.yaml --model Q"],
)
def test_what_trl_vllm_serve_would_not_start_is_refused(command: str) -> None:
    with pytest.raises(ConfigError):
        open_target(command).read()


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("temprature", "temperature"),
        ("vllm-mode", "vllm_mode"),
        ("vllm_importance_sampling_corection", "vllm_importance_sampling_correction"),
        ("max_step", "max_steps"),  # nothing that is judged, and mistyped all the same
    ],
)
def test_a_mistyped_key_of_a_trl_file_is_told_which_was_meant(key, meant):
    (told,) = opened(f"use_vllm: true\n{key}: 1").read().not_judged
    assert key in told
    assert told.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("key", ["per_device_eval_batch_size", "logging_steps", "max_prompt_length", "mine"])
def test_a_key_that_trl_has_or_nobody_meant_is_listed_as_it_stands(key):
    assert opened(f"use_vllm: true\n{key}: 1").read().not_judged == (key,)
