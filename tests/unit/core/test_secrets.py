"""One rule for names of secrets: a configuration refuses what the doctor hides, and whatever it refused before."""

import pytest

from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import InvalidValue
from zerodrift.core.secrets import flag_of_a_secret, names_a_secret

PLAIN = ("VLLM_USE_V1", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "PATH", "VLLM_LOGGING_LEVEL")
ALWAYS_REFUSED = (
    *("HF_TOKEN", "OPENAI_API_KEY", "MYKEY", "aws_secret_access_key", "DB_PASSWORD", "PASSWORD1"),
    # No secrets by the doctor's rule, and refused in a variable all the same.
    *("API_KEY_FILE", "TOKENS", "KEYRING"),
)


@pytest.mark.parametrize("name", ALWAYS_REFUSED)
def test_variables_that_were_refused_still_are(name):
    assert names_a_secret(name, variable=True)
    with pytest.raises(InvalidValue):
        EngineConfig(env={name: "x"})


@pytest.mark.parametrize("name", ["PGPASS", "GH_PAT", "SSH_PASSPHRASE", "SENTRY_DSN", "GCP_CREDENTIALS"])
def test_variables_that_the_doctor_hides_are_refused_too(name):
    assert names_a_secret(name)
    with pytest.raises(InvalidValue):
        EngineConfig(env={name: "x"})


@pytest.mark.parametrize("flag", ["--api-key", "--api_key=k", "--hf-token", "--hf_token=k", "--auth-token"])
def test_flags_of_secrets_are_refused(flag):
    assert flag_of_a_secret(flag.partition("=")[0])
    with pytest.raises(InvalidValue):
        EngineConfig(name="vllm", args=(flag,))


def test_other_names_are_none():
    assert not any(names_a_secret(name, variable=True) for name in PLAIN)
    assert EngineConfig(env=dict.fromkeys(PLAIN, "1")).env.keys() == set(PLAIN)
    flags = ("--max-num-batched-tokens=8", "--tokenizer-mode=auto", "--seed=1", "-tp", "key")
    assert EngineConfig(name="vllm", args=flags).args == flags
