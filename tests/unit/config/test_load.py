import re

import pytest

from zerodrift.config.load import Option, dump, load
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError, RetiredKey, UnknownKey


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("engine:\n  block_size: 16\n  args: [--enforce-eager]\nvalidation: {tolerance: 1e-3}\n")
    return path


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert type(caught.value) is ConfigError
    return str(caught.value)


def test_without_a_file_everything_is_default():
    assert load(None) == RunConfig()


@pytest.mark.parametrize(
    ("overrides", "cached"),
    [
        ([], True),
        (["engine.block_size=32"], True),
        (["engine.name=exact"], True),
        (["engine.enable_prefix_caching=false"], False),
        # Where a cached prefix may be stale it is not the default.
        (["engine.name=vllm"], False),
    ],
)
def test_the_engine_that_is_audited_by_default_caches_prefixes(overrides, cached):
    assert load(None, overrides).engine.enable_prefix_caching is cached


def test_a_file_and_overrides_in_order(file):
    config = load(file, ["engine.block_size=32", "engine.max_num_seqs=4", "engine.block_size=64"])
    assert config.engine.block_size == 64
    assert config.engine.max_num_seqs == 4
    assert config.engine.args == ("--enforce-eager",)
    assert config.validation.tolerance == 1e-3


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("engine.enable_prefix_caching=true", True),
        ("engine.enable_prefix_caching=null", None),
        ("engine.args=[--a, b=c]", ("--a", "b=c")),
        ("engine.startup_timeout_s=3", 3.0),
        ("engine.url=http://h:1/?a=b", "http://h:1/?a=b"),
        ("engine.python='123'", "123"),
    ],
)
def test_override_values_have_the_types_of_yaml(override, value):
    found = getattr(load(None, [override]).engine, re.split(r"[.=]", override)[1])
    assert found == value
    assert type(found) is type(value)


def test_an_override_may_hold_a_section(file):
    config = load(file, ["validation.gates={k3: 0.5}", "validation={seed: 3}"])
    assert (config.validation.gates.k3, config.validation.seed, config.validation.tolerance) == (0.5, 3, 1e-3)


@pytest.mark.parametrize(
    "text", ["engine.block_size", "=3", ".=3", "engine..name=x", "engine.=x", "", "model.path="]
)
def test_overrides_of_another_form_are_refused(text):
    assert f"--set {text}" in refusal(text)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("engine.block_size=x", "'x'"),
        ("engine.block_size=1.5", "1.5"),
        ("engine.block_size={x: 1}", "{'x': 1}"),
        ("engine.block_size.x=1", "{'x': 1}"),
        ("validation.seed=true", "True"),
        ("validation.gates.k3=x", "'x'"),
        ("engine.args=--x", "'--x'"),
        ("engine.args=[1]", "[1]"),
        ("engine.env={VLLM_CPU_KVCACHE_SPACE: 4}", "{'VLLM_CPU_KVCACHE_SPACE': 4}"),
        ("engine.env={1: a}", "{1: 'a'}"),
        ("engine.env={A: [1]}", "quotes"),
        ("engine.enforce_eager=1", "true or false"),
        ("engine.head_dtype=half", "auto or float32"),
        ("validation.precision=fp4", "fp32 or bf16 or fp8"),
        ("model.path=no", "False"),
        ("model.path=2026-01-01", "model.path"),
        ("engine.block_size=0", "engine: block_size is 0"),
        ("validation.gates.k3=0", "validation.gates: k3 is 0.0"),
        ("sampling_defaults.top_p=2", "sampling_defaults: top_p is 2.0"),
        ("validation.max_tokens=[", "validation.max_tokens"),
    ],
)
def test_wrong_values_are_refused_with_path_and_value(override, named):
    message = refusal(override)
    assert message.startswith(f"--set {override}")
    assert named in message


def test_an_error_names_the_layer_that_caused_it(file):
    with pytest.raises(ConfigError, match=r"^--set engine.block_size=x: "):
        load(file, ["engine.block_size=x", "engine.max_num_seqs=4"])
    file.write_text("engine: {block_size: x}")
    with pytest.raises(ConfigError, match=rf"^{file}: engine.block_size is 'x'"):
        load(file, ["engine.max_num_seqs=4"])


def test_unknown_and_retired_keys_are_refused_in_files_and_overrides(file):
    with pytest.raises(UnknownKey, match=r"--set engine.*blok_size=1.*engine.block_size"):
        load(None, ["engine.blok_size=1"])
    file.write_text("engine: {swap_space: 4}")
    with pytest.raises(RetiredKey):
        load(file)
    # An override cannot hide what the file says.
    with pytest.raises(RetiredKey):
        load(file, ["engine={block_size: 1}"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# only a comment\n",
        b"[1, 2]",
        b"text",
        b"engine:\n",
        b"engine: {block_size: 1}\nengine: {block_size: 2}",
        b"\tengine: 1",
        b"model: {path: caf\xe9}",
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(file, content):
    file.write_bytes(content)
    for path in (file, file.parent, file.parent / "nothing.yaml"):
        with pytest.raises(ConfigError):
            load(path)


def test_a_dump_is_complete(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(dump(RunConfig()), encoding="utf-8")
    assert load(path) == RunConfig()
    assert "consecutive_windows: 3" in path.read_text()


def test_an_option_is_not_parsed_and_is_cited_by_its_flag():
    assert load(None, [], [Option("MODEL", "model.path", "100")]).model.path == "100"
    with pytest.raises(ConfigError, match=r"^--temperature: "):
        load(None, [], [Option("--temperature", "sampling_defaults.temperature", -1.0)])
