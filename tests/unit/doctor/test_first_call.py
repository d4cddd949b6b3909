"""oneMKL picks a kernel when a function is first called; on CPU a variable keeps threads from picking different ones."""

import pytest

from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.judge import cures
from zerodrift.doctor.kinds import FileKind
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.target import Target

RULE = "first-call-on-cpu"
CPU = "VLLM_CPU_KVCACHE_SPACE=1"


def judged(target: Target | str) -> Diagnosis:
    return diagnose(CommandLine(target) if isinstance(target, str) else target, {})[0]


def fires(target: Target | str) -> bool:
    return RULE in {finding.rule for finding in judged(target).findings}


@pytest.mark.parametrize(
    "variables",
    [
        "",
        "MKL_CBWR=",
        "MKL_CBWR=AUTO",
        "MKL_CBWR=auto",
        "MKL_CBWR=AUTO,STRICT",
        "MKL_CBWR=AVX512",
        "MKL_CBWR=AVX512_E1",
        "MKL_CBWR='AVX512,STRICT'",
        "OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind",
        # vLLM overwrites the number of threads where it binds them.
        "OMP_NUM_THREADS=1",
        "OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=0-3",
        "OMP_NUM_THREADS=$THREADS VLLM_CPU_OMP_THREADS_BIND=nobind",
    ],
)
def test_threads_may_pick_different_kernels(variables: str) -> None:
    assert fires(f"{CPU} {variables} vllm serve Q")


@pytest.mark.parametrize(
    "command",
    [
        f"{CPU} MKL_CBWR=AVX2 vllm serve Q",
        f"{CPU} MKL_CBWR=avx2 vllm serve Q",
        f"{CPU} MKL_CBWR=AVX2,STRICT vllm serve Q",
        f"{CPU} MKL_CBWR=AVX vllm serve Q",
        f"{CPU} MKL_CBWR=COMPATIBLE vllm serve Q",
        f"{CPU} MKL_CBWR=$BRANCH vllm serve Q",
        f"{CPU} OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve Q",
        "CUDA_VISIBLE_DEVICES=0 vllm serve Q",
        "CUDA_VISIBLE_DEVICES=0 MKL_CBWR=AUTO vllm serve Q",
        "MKL_CBWR=AUTO vllm serve Q",
        "vllm serve Q",
    ],
)
def test_nothing_is_said_where_they_cannot_or_nobody_knows(command: str) -> None:
    assert not fires(command)


def test_it_is_no_setting_elsewhere() -> None:
    assert "mkl_cbwr" not in CommandLine("vllm serve Q").read().settings
    assert "mkl_cbwr" not in CommandLine("CUDA_VISIBLE_DEVICES=0 vllm serve Q").read().settings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{CPU} vllm serve Q", f"{CPU} MKL_CBWR=AVX2 vllm serve Q"),
        (f"{CPU} MKL_CBWR=AVX512_E1 vllm serve Q", f"{CPU} MKL_CBWR=AVX2 vllm serve Q"),
        (f"docker run -e {CPU} i vllm serve Q", f"docker run -e MKL_CBWR=AVX2 -e {CPU} i vllm serve Q"),
    ],
)
def test_the_correction_is_the_variable(before: str, after: str) -> None:
    target = CommandLine(before)
    assert cures(diagnose(target, {})[1])["mkl_cbwr"] == "AVX2"
    assert target.changed({"mkl_cbwr": "AVX2"}) == after
    assert not fires(after)


def test_a_file_leaves_it_to_the_command() -> None:
    file = open_text("model: Q\n", "serve.yaml", FileKind.VLLM)
    assert file.typed("mkl_cbwr", "AVX2") == "MKL_CBWR=AVX2 before the command"


def test_our_own_engine_runs_on_one_thread_unless_told() -> None:
    def ours(env: str) -> Target:
        return open_text(f"engine: {{name: vllm, env: {{{env}}}}}\n", "run.yaml", FileKind.ZERODRIFT)

    assert not fires(ours("VLLM_CPU_KVCACHE_SPACE: '1'"))
    assert fires(ours("VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '4'"))
    assert not fires(ours("VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '4', MKL_CBWR: AVX2"))
