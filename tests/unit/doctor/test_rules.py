"""For every rule, a target that breaks it: commands as people type them, files as they keep them."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from zerodrift.core.cause import CAUSES
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.rule import Severity, rules
from zerodrift.doctor.setting import FileKind, Origin, Setting, Target
from zerodrift.doctor.tables import names


class Example(NamedTuple):
    """What is handed to the doctor, and what it is told besides."""

    text: str
    kind: FileKind | None = None
    """None for a command line."""
    temperature: float | None = None


SOUND = "vllm serve Q --dtype bfloat16 --logprobs-mode processed_logprobs --generation-config vllm"
SOUND += " --no-enable-prefix-caching --no-async-scheduling"
CPU = "VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_ATTN_SPLIT_KV=0 MKL_CBWR=AVX2"
INVARIANT = f"VLLM_BATCH_INVARIANT=1 VLLM_USE_FLASHINFER_SAMPLER=0 {SOUND}"


def flag(words: str) -> Example:
    return Example(f"{SOUND} {words}")


def variable(assignment: str) -> Example:
    return Example(f"{assignment} {SOUND}")


def trl(*lines: str) -> Example:
    return Example("\n".join(("model_name_or_path: Q", "use_vllm: true", *lines)) + "\n", FileKind.TRL)


def pipelinerl(*lines: str) -> Example:
    return Example(
        "\n".join(("defaults: [base, _self_]", "max_lag: 4096", *lines)) + "\n", FileKind.PIPELINERL
    )


def ours(*lines: str) -> Example:
    return Example(
        "\n".join(("engine: {name: vllm}", "sampling_defaults:", *lines)) + "\n", FileKind.ZERODRIFT
    )


FIRING: dict[str, Example] = {
    "raw-logprobs": Example("vllm serve Q"),
    "raw-logprobs-at-one": Example("vllm serve Q", temperature=1.0),
    "logits-for-logprobs": flag("--logprobs-mode raw_logits"),
    "greedy": Example(SOUND, temperature=0.0),
    "temperatures-differ": trl("temperature: 0.9", "generation_kwargs: {temperature: 0.7}"),
    "top-p": trl("top_p: 0.9"),
    "top-k": trl("top_k: 50"),
    "min-p": trl("min_p: 0.05"),
    "repetition-penalty": trl("repetition_penalty: 1.05"),
    "presence-penalty": ours("  presence_penalty: 0.5"),
    "frequency-penalty": ours("  frequency_penalty: 0.5"),
    "generation-config-applied": Example("vllm serve {model}"),
    "generation-config-unseen": Example("vllm serve Q"),
    "generation-config-overridden": flag("""--override-generation-config '{"top_p": 0.9}'"""),
    "no-logprobs": flag("--max-logprobs 0"),
    "text-for-tokens": Example(SOUND),
    "own-logits-processors": flag("--logits-processors my.Processor"),
    "grammar": trl("vllm_structured_outputs_regex: '[a-z]+'"),
    "watermarked": flag("""--watermark-config '{"key": 7}'"""),
    "one-seed-for-all": Example(SOUND),
    "short-tail": Example(SOUND),
    "head-differs": trl("cast_lm_head_to_fp32: true"),
    "head-in-model-dtype": Example(SOUND),
    "head-outside-invariance": Example(f"""{INVARIANT} --hf-overrides '{{"head_dtype": "float32"}}'"""),
    "dtype-by-itself": Example("vllm serve Q"),
    "dtypes-differ": pipelinerl("finetune: {load_as_bf16: false}"),
    "half": flag("--dtype float16"),
    "quantised-weights": flag("--quantization fp8"),
    "quantisation-unseen": Example(SOUND),
    "quantised-kv": flag("--kv-cache-dtype fp8_e5m2"),
    "quantised-trainer": trl("load_in_8bit: true"),
    "autocast": trl(),
    "async-scheduling": Example("vllm serve Q"),
    "no-chunked-prefill": flag("--no-enable-chunked-prefill"),
    "cut-prompts": flag("--max-num-batched-tokens 2k --max-model-len 8192"),
    "cpu-seed-in-chunks": Example(f"{CPU} {SOUND} --max-model-len 8192"),
    "batch-variant": Example(SOUND),
    "invariance-on-cpu": Example(f"{CPU} {INVARIANT}"),
    "invariance-on-hopper": Example(INVARIANT),
    "backend-without-invariance": Example(f"{INVARIANT} --attention-backend FLASHINFER"),
    "invariance-and-flashinfer-sampler": variable("VLLM_BATCH_INVARIANT=1"),
    "invariance-and-parallelism": Example(f"{INVARIANT} -tp 4"),
    "parallel-sums": flag("-tp 2"),
    "split-kv-on-cpu": variable("VLLM_CPU_KVCACHE_SPACE=1"),
    "first-call-on-cpu": variable("VLLM_CPU_KVCACHE_SPACE=1"),
    "engine-v0": variable("VLLM_USE_V1=0"),
    "speculation": flag("--spec-method ngram"),
    "compiled": Example(SOUND),
    "no-window": flag("--disable-sliding-window"),
    "other-model": flag("--hf-overrides.rope_theta 1e6"),
    "beyond-the-context": variable("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
    "experts-elsewhere": flag("-ep"),
    "no-cascade": flag("--disable-cascade-attn"),
    "stale-prefixes": Example("vllm serve Q"),
    "reset-not-read": trl("vllm_mode: server"),
    "external-kv": flag("--kv-offloading-size 16"),
    "pipeline-and-updates": flag("--pipeline-parallel-size=2"),
    "replicas": flag("-dp 8"),
    "dummy-weights": flag("--load-format dummy"),
    "adapters": flag("--enable-lora"),
    "adapters-at-run-time": variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"),
    "sleep": trl("vllm_enable_sleep_mode: true"),
    "open-control": variable("VLLM_SERVER_DEV_MODE=1"),
    "pickle-from-the-network": variable("VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
    "pickle-on-this-machine": Example(f"VLLM_ALLOW_INSECURE_SERIALIZATION=1 {SOUND} --host localhost"),
    "no-key": Example(SOUND),
    "remote-code": flag("--trust-remote-code"),
    "redis-open": pipelinerl("streams: {backend: redis}"),
    "refused": Example("vllm serve Q --logprobs-mode raw"),
    "dropped-lines": Example("model: Q\nenable_prefix_caching: false\n", FileKind.VLLM),
    "config-not-read": flag("--config={model}/serve.yaml"),
    "configured-elsewhere": trl("vllm_mode: server"),
    "no-correction": trl("vllm_importance_sampling_correction: false"),
    "products-of-ratios": trl("max_completion_length: 2048"),
    "outputs-that-do-not-fit": trl("vllm_max_model_length: 1024", "max_completion_length: 2048"),
    "random-forward": trl("use_peft: true"),
    "packed": pipelinerl(),
    "no-oldest": Example("defaults: [base]\n", FileKind.PIPELINERL),
    "kl-not-read": pipelinerl("finetune: {rl: {policy_loss: gspo, kl_coef: 0.1}}"),
    "entropy-not-read": pipelinerl("finetune: {rl: {policy_loss: gspo, entropy_bonus: 0.1}}"),
    "fsdp-keeps-the-head": pipelinerl("use_fsdp: true"),
}

# Of every kind one about which nothing is said that could be said: rules that a kind cannot break are silent there.
QUIET = (
    Example(
        f"""{SOUND} --host 127.0.0.1 --enforce-eager --use-fp64-gumbel --return-tokens-as-token-ids"""
        """ --hf-overrides '{"head_dtype": "float32"}'""",
        temperature=1.0,
    ),
    Example(f"VLLM_USE_V1=1 {CPU} {SOUND}"),
    Example(f"{INVARIANT} --attention-backend TRITON_ATTN"),
    trl("bf16: false", "use_peft: true", "lora_dropout: 0.0"),
    pipelinerl("finetune: {seq_packing: false}"),
    ours("  temperature: 1.0"),
    Example("model: Q\nenable-prefix-caching: false\n", FileKind.VLLM),
    Example(f"{SOUND} --config {Path(__file__).parents[3] / 'docs/doctor/serve.yaml'}"),
)
LEFT = {"greedy", "config-not-read"}
"""What `--fix` does not write: what was asked besides the text, and the file of a command."""
DEFAULTS_MEASURED = "defaults-measured"
"""Only a server can break it: tests/contract/test_doctor_server.py."""
NEVER_SHOWN = {"unseen-words", "unasked-server"}
"""Always open, never shown to hold: test_command.py and test_files.py."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose files hold sampling defaults, as Qwen's do."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 1.0})
    )
    (directory / "serve.yaml").write_text("seed: 3\n")
    return directory


def opened(text: str, example: Example) -> Target:
    return CommandLine(text) if example.kind is None else open_text(text, "file.yaml", example.kind)


def judged(text: str, example: Example) -> Diagnosis:
    return diagnose(opened(text, example), asked(example))[0]


def asked(example: Example) -> dict[str, Setting]:
    if example.temperature is None:
        return {}
    return {"temperature": Setting("temperature", example.temperature, Origin.ASKED)}


def fired(diagnosis: Diagnosis) -> set[str]:
    return {finding.rule for finding in diagnosis.findings}


def test_every_rule_has_an_example():
    assert set(FIRING) | {DEFAULTS_MEASURED} | NEVER_SHOWN == {rule.id for rule in rules()}
    assert len({rule.id for rule in rules()}) == len(rules())


@pytest.mark.parametrize("name", FIRING)
def test_every_rule_can_fire(name, model):
    example = FIRING[name]
    assert name in fired(judged(example.text.replace("{model}", str(model)), example))


@pytest.fixture(scope="module")
def diagnoses():
    return [judged(example.text, example) for example in (*QUIET, *FIRING.values())]


@pytest.mark.parametrize("name", FIRING)
def test_every_rule_can_be_silent(name, diagnoses):
    """On a target that has the setting: a rule that is silent because it does not apply shows nothing."""
    rule = next(rule for rule in rules() if rule.id == name)
    having = [each for each in diagnoses if rule.setting in {row.setting for row in each.settings}]
    assert any(name not in fired(each) for each in having)


@pytest.mark.parametrize("name", FIRING)
def test_a_corrected_target_has_nothing_wrong(name, model):
    example = FIRING[name]
    target = opened(example.text.replace("{model}", str(model)), example)
    corrected = target.corrected(fixes(diagnose(target, asked(example))[1]))
    assert corrected is not None
    again = diagnose(corrected, asked(example))[0]
    assert again.exit_code == (1 if name in LEFT else 0)
    rule = next(rule for rule in rules() if rule.id == name)
    if rule.fix and rule.severity in (Severity.WRONG, Severity.RISK) and name not in LEFT:
        assert name not in fired(again)


def test_a_sound_target_is_left_alone():
    target = CommandLine(SOUND)
    assert fixes(diagnose(target, {})[1]) == {}
    assert target.printed() == SOUND


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_a_rule_is_complete(rule):
    assert rule.cause is None or rule.cause in CAUSES
    assert {rule.setting, *rule.when, *rule.unless, *rule.fix} <= set(names())
    assert rule.setting in rule.when or rule.severity is not Severity.UNKNOWN
    assert rule.source
    assert rule.message.endswith(".")
    assert not rule.do.endswith(".")
    assert len(rule.message) < 300
