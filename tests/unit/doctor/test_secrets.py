"""Nothing of a secret is printed, however it is spelled: not in a diagnosis, not in a correction, not in an error."""

import json
import shlex

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.secrets import HIDDEN, holds_a_secret, names_a_secret, safe, without_secrets
from zerodrift.doctor.setting import FileKind, Target
from zerodrift.doctor.vllm_flags import flag_names

ONE, TWO = "hunter2", "swordfish"


def printed(target: Target) -> str:
    """All that the doctor can say about it."""
    diagnosis, judgements = diagnose(target, {})
    said = [msgspec.json.encode(diagnosis).decode(), target.printed()]
    changes = fixes(judgements)
    said += [str(target.typed(name, value)) for name, value in changes.items()]
    if (corrected := target.corrected(changes)) is not None:
        said += [corrected.printed(), msgspec.json.encode(diagnose(corrected, {})[0]).decode()]
    return "\n".join(said)


def said_of(text: str, kind: FileKind | None = None) -> str:
    try:
        return printed(CommandLine(text) if kind is None else open_text(text, "f.yaml", kind))
    except ConfigError as error:
        return str(error)


NAMES = st.sampled_from(
    [
        "api-key",
        "hf_token",
        "my-secret",
        "db.password",
        "OPENAI_API_KEY",
        "apiKey",
        "auth",
        "credentials",
        "passwd",
    ]
)
PIECES = st.sampled_from(
    [ONE, f"{ONE} {TWO}", f"-{ONE}", f"--{ONE}", f"{ONE}={TWO}", f"{{{ONE}", f"'{ONE}'", f"{ONE},{TWO}"]
)
NOISE = st.sampled_from(
    ["--seed 1", "-tp 2", "--dtype half", "--enable-lora", "--lgprobs-mode x", "extra", "--api-key", "$X"]
)


def structure(secret: str) -> st.SearchStrategy[object]:
    """JSON that holds the secret under a name, at any depth, also as JSON inside a string."""
    named = st.builds(lambda name, listed: {name: [secret] if listed else secret}, NAMES, st.booleans())
    return st.recursive(
        named,
        lambda inner: st.one_of(
            st.builds(lambda each: {"a": each, "b": 1}, inner),
            st.builds(lambda each: [each], inner),
            st.builds(lambda each: {"text": json.dumps(each)}, inner),
        ),
        max_leaves=3,
    )


@st.composite
def secret_words(draw: st.DrawFn) -> str:
    """A flag with a secret, quoted or not, as a word of a command."""
    name, secret = draw(NAMES), draw(PIECES)
    quoted = draw(
        st.sampled_from([shlex.quote(secret), json.dumps(secret), secret, f'"${{K:-{ONE}}}"', f"'${ONE}'"])
    )
    written = json.dumps(draw(structure(ONE)))
    return draw(
        st.sampled_from(
            [
                f"--{name} {quoted}",
                f"--{name}={quoted}",
                f"--{name} {shlex.quote(secret)} {shlex.quote(TWO)}",
                f"--api {quoted}",
                f"--hf-overrides {shlex.quote(written)}",
                f"--model-loader-extra-config={shlex.quote(written)}",
                f"--model-loader-extra-config {written}",
                f"--additional-config.a.{name} {quoted}",
                f"--chat-template {shlex.quote(written[:-1])}",
                f"--otlp-traces-endpoint https://me:{ONE}@host/",
            ]
        )
    )


@st.composite
def secret_commands(draw: st.DrawFn) -> str:
    words = draw(st.lists(st.one_of(NOISE, secret_words()), min_size=1, max_size=4))
    name, secret = draw(NAMES).replace("-", "_").replace(".", "_"), shlex.quote(draw(PIECES))
    program = draw(
        st.sampled_from(
            [
                "vllm serve Q",
                f"{name}={secret} vllm serve Q",
                f"env {name}={secret} nohup vllm serve Q",
                f"{name}={ONE} {TWO} vllm serve Q",
                f"export {name}={secret}\nvllm serve Q",
                f"export {name}={ONE} {TWO}\nvllm serve Q",
                f"K={secret}\nvllm serve Q --api-key $K",
                f"docker run -e {name}={secret} i vllm serve Q",
                f"docker run --env={name}={secret} vllm/vllm-openai Q",
                f"srun --export=ALL,{name}={secret} vllm serve Q",
                f"kubectl exec --token {secret} pod -- vllm serve Q",
                f"OPTIONS='--token={ONE}' vllm serve Q",
                f"ray job submit --runtime-env-json '{json.dumps({name: ONE})}' -- vllm serve Q",
                "python -m pipelinerl.entrypoints.run_vllm1 --model Q",
            ]
        )
    )
    comment = draw(st.sampled_from(["", f" # {name}={ONE}"]))
    return f"{program} {' '.join(words)}{comment}"


@settings(max_examples=150, deadline=None)
@given(secret_commands())
def test_no_command_shows_its_secrets(command: str) -> None:
    text = said_of(command)
    assert ONE not in text
    assert TWO not in text


@st.composite
def secret_files(draw: st.DrawFn) -> tuple[str, FileKind]:
    name, secret = draw(NAMES), json.dumps(draw(PIECES))
    held = draw(structure(ONE))
    lines = draw(
        st.sampled_from(
            [
                f"{name}: {secret}",
                f"{name}: {secret} # {TWO}: no, {name}: {ONE}",
                f"{name}: [{secret}, {secret}]",
                f"{name}:\n  - {secret}\n  - x",
                f"{name}: |\n  {ONE}\n  {TWO}",
                f"{name}: &k {secret}\nother: *k",
                f"x: &k {secret}\n{name}: *k",
                f"watermark-config: {{a: {secret}}}",
                f"# {name}: {secret}",
                f"hf-overrides: {json.dumps(held)}",
                f"model-loader-extra-config: {json.dumps(json.dumps(held))}",
                f"lora-modules: [{json.dumps(json.dumps(held))}]",
                f"chat-template: {json.dumps(json.dumps(held)[:-1])}",
                f"args: ['--{name}', {secret}, --seed]",
            ]
        )
    )
    kind, head = draw(
        st.sampled_from(
            [
                (FileKind.VLLM, "model: Q"),
                (FileKind.TRL, "use_vllm: true\ntop_p: 0.9"),
                (FileKind.PIPELINERL, "defaults: [base]"),
            ]
        )
    )
    return f"{head}\n{lines}\n", kind


@settings(max_examples=100, deadline=None)
@given(secret_files())
def test_no_file_shows_its_secrets(file: tuple[str, FileKind]) -> None:
    text = said_of(*file)
    assert ONE not in text
    assert TWO not in text


# --- names that no rule knows: what is not in the tables is not shown ----------------------------------------------

UNHEARD = st.from_regex(r"[a-z]{3,8}_[a-z]{2,6}", fullmatch=True).filter(
    lambda name: not names_a_secret(name) and not any(each.startswith(name[:3]) for each in flag_names())
)
QUOTED = st.sampled_from(
    [ONE, f"'{ONE}'", f'"{ONE} {TWO}"', f"{ONE},{TWO}", f"{ONE} {TWO}", f"'{ONE}={TWO}'"]
)


@st.composite
def unheard_commands(draw: st.DrawFn) -> str:
    name, value, noise = draw(UNHEARD), draw(QUOTED), draw(NOISE)
    flag = name.replace("_", draw(st.sampled_from("-_.")))
    return draw(
        st.sampled_from(
            [
                f"{name.upper()}={value} vllm serve Q {noise}",
                f"env A=1 {name}={value} nohup vllm serve Q {noise}",
                f"vllm serve Q {noise} --{flag} {value}",
                f"vllm serve Q --{flag}={value} {noise}",
                f"vllm serve Q -{name} {value} {noise}",
                f"vllm serve Q -x{ONE} {noise}",
                f"vllm serve Q --enable-lora {name}={ONE}",
                f"vllm serve Q {noise} # {name}={ONE}",
                f"docker run --gpus all -e {name}={ONE} vllm/vllm-openai:latest --model Q",
                f"docker run --env={name}={ONE} --{flag} {ONE} vllm/vllm-openai --model Q",
                f"kubectl exec --{flag} {value} pod -- vllm serve Q",
                f"export {name}={value}\nvllm serve Q {noise}",
            ]
        )
    )


@settings(max_examples=150, deadline=None)
@given(unheard_commands())
def test_no_command_shows_the_value_of_a_name_that_is_in_no_table(command: str) -> None:
    text = said_of(command)
    assert ONE not in text
    assert TWO not in text


@settings(max_examples=50, deadline=None)
@given(
    UNHEARD,
    st.sampled_from(
        ["{}: hunter2", "{}: [a, hunter2]", "{}: {{a: hunter2}}", "# {}: hunter2", "{}: |\n  hunter2"]
    ),
)
def test_no_file_of_vllm_shows_the_value_of_a_key_that_is_in_no_table(name: str, line: str) -> None:
    assert ONE not in said_of(f"model: Q\n{line.format(name)}\nseed: 1\n", FileKind.VLLM)


@settings(max_examples=30, deadline=None)
@given(UNHEARD)
def test_variables_and_arguments_in_a_file_of_ours_are_those_of_a_command(name: str) -> None:
    engine = f"engine: {{name: vllm, args: [--{name}, {ONE}, --seed, '1'], env: {{{name}: {TWO}}}}}"
    text = open_text(f"{engine}\n", "f.yaml", FileKind.ZERODRIFT).printed()
    assert ONE not in text
    assert TWO not in text
    assert "'1'" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "HF_TOKEN=x vllm serve Q --api-key a b -tp 2",
            'HF_TOKEN="$HF_TOKEN" vllm serve Q --api-key "$API_KEY" "$API_KEY" -tp 2',
        ),
        ("vllm serve Q --api-key=a", 'vllm serve Q --api-key="$API_KEY"'),
        ("vllm serve Q --api-key '$a'", 'vllm serve Q --api-key "$API_KEY"'),
        # The controls: what is no secret, or comes from a variable, stays as it was written.
        ('vllm serve Q --api-key "$KEY"', None),
        ('HF_TOKEN=${T} vllm serve Q --api-key="${KEY}"', None),
        ('vllm serve Q --hf-overrides \'{"eos_token_id": [1, 2], "tokens": "x"}\'', None),
        ("vllm serve Q --max-num-batched-tokens 4096 --tokenizer x --ssl-keyfile f", None),
        ('vllm serve Q --model-loader-extra-config \'{"token": null, "key": ""}\'', None),
        (
            "docker run --rm -it --gpus all -p 80:80 --ipc=host vllm/vllm-openai:v1 --model m # as it was",
            None,
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V1=1 nice -n 10 python -u -m vllm.entrypoints.openai.api_server",
            None,
        ),
        (
            "vllm serve Q --lora-modules sql=/l code=/c --tensor-par 2 -qfp8 -O3 --hf-overrides.a b -tp 2",
            None,
        ),
        ("sudo -E VLLM_USE_V1=1 vllm serve Q -seed 1", None),
        ("env -i MKL_CBWR=COMPATIBLE vllm serve Q --served-model-name a b --enable-lora", None),
        (
            "DB_PASS=hunter2 TS_AUTHKEY=tskey-auth-x vllm serve M",
            'DB_PASS="$DB_PASS" TS_AUTHKEY="$TS_AUTHKEY" vllm serve M',
        ),
        (
            "docker run --weird -e HF_TOKEN=x -e A=1 -e VLLM_USE_V1=1 --env=B=y vllm/vllm-openai Q",
            'docker run --weird -e HF_TOKEN="$HF_TOKEN" -e A="$A" -e VLLM_USE_V1=1 --env=B="$B" vllm/vllm-openai Q',
        ),
        ("vllm serve Q --frob a b --seed 1 -xab", 'vllm serve Q --frob "$FROB" "$FROB" --seed 1 -x"$X"'),
    ],
)
def test_what_a_command_looks_like_without_them(before: str, after: str | None) -> None:
    assert CommandLine(before).printed() == (before if after is None else after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hub_token: abc # ours\nuse_vllm: true\n", f"hub_token: {HIDDEN} # ours\nuse_vllm: true\n"),
        ("use_vllm: true\napi_keys: [a, null]\n", f"use_vllm: true\napi_keys: {HIDDEN}\n"),
        ("use_vllm: true\napi-key: null\napi_key_env: NAME\nmax_tokens: 3 # a token\n", None),
        ("use_vllm: true\na: &k 'b c'  # as it was\nb: *k\n", None),
    ],
)
def test_what_a_file_looks_like_without_them(before: str, after: str | None) -> None:
    assert open_text(before, "f.yaml", None).printed() == (before if after is None else after)


def test_a_file_of_vllm_keeps_what_the_tables_know() -> None:
    before = "model: Q # ours\nserved_model_name: [a, b]\nhf-overrides: {rope: x}\n"
    assert open_text(before, "f.yaml", FileKind.VLLM).printed() == before
    hidden = open_text(f"{before}db_pass: hunter2\nfrob: 3\n", "f.yaml", FileKind.VLLM)
    assert hidden.printed() == f"{before}db_pass: {HIDDEN}\nfrob: {HIDDEN}\n"
    assert hidden.hides
    assert not open_text(before, "f.yaml", FileKind.VLLM).hides


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (name, True)
            for name in (
                *("HF_TOKEN", "api-key", "my_secret", "db.password", "apiKey", "hfToken", "auth", "pass"),
                *("DB_PASS", "PGPASS", "REDIS_PASS", "TS_AUTHKEY", "SSHKEY", "PRIVATEKEY", "accesskey"),
                *("HF_TOKENS", "access_tokens", "JWT", "SENTRY_DSN", "GIT_PAT", "COOKIES", "dbPass"),
            )
        ),
        *(
            (name, False)
            for name in (
                *("tokenizer", "max-tokens", "monkey", "api_key_env", "seed", "pad_token_id", "author"),
                *("pass_config", "ignore-patterns", "spec-tokens", "bypass", "path", "compass", "patch_size"),
            )
        ),
    ],
)
def test_names_of_secrets(name: str, expected: bool) -> None:
    assert names_a_secret(name) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"t\\u006fken": "x"}', True),
        ('{"token": "x", "token": null}', True),
        ('{"a": ' * 5000 + "1" + "}" * 5000, True),
        ("{not json", True),
        ("Authorization: Bearer x", True),
        ("--token x", True),
        ("hf_abcdefghijABCDEFGHIJ0123", True),
        ("https://me:pw@host/", True),
        ('{"a": ["b"]}', False),
        ("Qwen/Qwen3-8B", False),
        ("https://host:8000/v1", False),
        ("a=b", False),
    ],
)
def test_values_that_may_hold_one(value: str, expected: bool) -> None:
    assert holds_a_secret(value) is expected
    assert safe(value) == (HIDDEN if expected else value)


def test_keys_are_known_by_their_shape() -> None:
    assert without_secrets("use hf_abcdefghijABCDEFGHIJ0123 now") == f"use {HIDDEN} now"
