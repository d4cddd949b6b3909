"""What `--vllm-version` says of other releases is what their own parsers say, as far as these are installed here."""

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zerodrift.doctor.other_version import DIFFER
from zerodrift.doctor.tables import VLLM_VERSION, VllmRelease, vllm_names, vllm_releases

pytestmark = [pytest.mark.engines, pytest.mark.long]  # an import of vLLM for each

ENGINES = Path(__file__).parents[2] / ".engines"
RELEASES = {"0.8": "0.8.5", "0.18": "0.18.1", "0.28": "0.28.0"}
HERE = [
    version
    for version, release in RELEASES.items()
    if (ENGINES / f"vllm-{release}" / "bin" / "python").exists()
]
FILLED_IN = {"prefix_caching", "async_scheduling", "chunked_prefill", "max_num_batched_tokens"}
"""When everything is parsed, by every release."""
PARSER = """
import json
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
from vllm import envs
print(json.dumps({
    **{word: repr(a.default) for a in make_arg_parser(FlexibleArgumentParser())._actions for word in a.option_strings},
    **{name: repr(getattr(envs, name, None)) for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_CPU_ATTN_SPLIT_KV")},
}))
"""


def test_every_release_of_the_table_can_be_installed() -> None:
    assert RELEASES.keys() == vllm_releases().keys()


@pytest.mark.parametrize("version", [VLLM_VERSION, *HERE])
def test_defaults_and_missing_flags_are_the_releases_own(version: str) -> None:
    python = ENGINES / f"vllm-{RELEASES.get(version, '0.32.0')}" / "bin" / "python"
    if not python.exists():
        pytest.skip("engines/install vllm-0.32.0")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    env.pop("PYTHONPATH", None)
    run = subprocess.run(
        [python, "-c", PARSER], env=env, capture_output=True, text=True, check=True, timeout=900
    )
    compare(version, json.loads(run.stdout.splitlines()[-1]))


def compare(version: str, real: dict[str, str]) -> None:
    """`real` has flags and variables of a release with their defaults, as Python writes them."""
    # Of our own version, the table that others are told apart from.
    ours = {name: vllm_names()[name].default for name in DIFFER - FILLED_IN}
    release = vllm_releases().get(version, VllmRelease(ours, ()))
    flags = {spec.flag for spec in vllm_names().values() if spec.flag}
    assert {flag for flag in flags if f"--{flag}" not in real} == set(release.lacks)
    assert set(release.defaults) <= DIFFER
    for name in DIFFER:
        spec = vllm_names()[name]
        default: Any = ast.literal_eval(real.get(f"--{spec.flag}" if spec.flag else str(spec.env), "None"))
        # None is filled in later, but for a seed, which is then none.
        if name in release.defaults:
            assert release.defaults[name] == default, name
        else:
            assert default is None, name
