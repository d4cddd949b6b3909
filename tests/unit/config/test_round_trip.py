"""Theorem: every configuration that can exist survives being written and read."""

import tempfile
from pathlib import Path
from typing import Any, get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerodrift.config.engine import EngineConfig
from zerodrift.config.load import dump, load
from zerodrift.config.model import Dtype, ModelConfig
from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.precision import Precision
from zerodrift.config.run import RunConfig
from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.config.validation import GateConfig, ValidationConfig


def sections(kind: type, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every subset of `values`, so that defaults are part of the search."""
    return st.fixed_dictionaries({}, optional=values).map(lambda given: kind(**given))


counts = st.integers(1, 2**40)
positive = st.floats(1e-15, 1e9)
text = st.text(min_size=1)
dtypes = st.sampled_from(get_args(Dtype))
flags = st.none() | st.booleans()

models = sections(ModelConfig, path=text, dtype=dtypes, max_model_len=st.integers(2**20, 2**40))
engines = sections(
    EngineConfig,
    name=text,
    python=text,
    args=st.lists(st.text()).map(tuple),
    env=st.dictionaries(st.text("abc_", min_size=1), st.text()),
    startup_timeout_s=st.floats(0.1, 1e9),
    block_size=counts,
    max_num_seqs=counts,
    enable_chunked_prefill=flags,
    enable_prefix_caching=flags,
    async_scheduling=flags,
    gpu_memory_utilization=st.floats(0.01, 1),
    logprobs_mode=st.sampled_from(["processed_logprobs", "raw_logprobs"]),
) | sections(EngineConfig, url=text.filter(lambda rest: "@" not in rest).map(lambda rest: f"http://{rest}"))
samplings = sections(SamplingDefaults, temperature=st.just(0.0)) | sections(
    SamplingDefaults,
    temperature=st.floats(0.01, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    stop=st.lists(text).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**40)).map(tuple),
)
monitorings = sections(MonitoringConfig, kl_threshold=positive, consecutive_windows=counts)
validations = sections(
    ValidationConfig,
    prompts=text,
    num_prompts=st.integers(1, 48),
    seed=st.integers(0, 2**63 - 1),
    property_based_prompts=st.booleans(),
    precision=st.sampled_from(Precision),
    position_probes=st.lists(st.floats(0.01, 16), max_size=16).map(tuple),
    tolerance=positive,
    gates=sections(GateConfig, mean_abs=positive, p90_abs=positive, k3=positive),
)
configs = sections(
    RunConfig,
    model=models,
    engine=engines,
    sampling_defaults=samplings,
    monitoring=monitorings,
    validation=validations,
)


@given(configs)
@settings(max_examples=60, deadline=None)
@example(RunConfig(model=ModelConfig(path="1e-3")))
@example(RunConfig(model=ModelConfig(path="\x85")))
@example(RunConfig(model=ModelConfig(path="\u2028 🙂")))
def test_load_undoes_dump(config):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.yaml")
        path.write_text(dump(config), encoding="utf-8")
        assert load(path) == config
