"""Nothing of a secret is printed, however it is spelled: not in a diagnosis, not in a correction, not in an error."""

import json
import shlex

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.core.errors import ConfigError
from zerodrift.core.secrets import names_a_secret
from zerodrift.doctor.command import CommandLine
from zerodrift.doctor.diagnosis import diagnose
from zerodrift.doctor.judge import fixes
from zerodrift.doctor.open_target import open_text
from zerodrift.doctor.secrets import HIDDEN, VALUE, may_hold_one, safe
from zerodrift.doctor.setting import FileKind, Target

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
    ("api-key", "hf_token", "my-secret", "db.password", "OPENAI_API_KEY", "apiKey", "auth", "credentials")
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
    wraps = st.sampled_from([lambda each: {"a": each, "b": 1}, lambda each: [each], _as_text])
    return st.recursive(
        named, lambda inner: st.builds(lambda wrap, each: wrap(each), wraps, inner), max_leaves=3
    )


def _as_text(value: object) -> object:
    return {"text": json.dumps(value)}


@st.composite
def secret_words(draw: st.DrawFn) -> str:
    """A flag with a secret, quoted or not, as a word of a command."""
    name, secret = draw(NAMES), draw(PIECES)
    quotes = [shlex.quote(secret), json.dumps(secret), secret, f'"${{K:-{ONE}}}"', f"'${ONE}'"]
    quoted, written = draw(st.sampled_from(quotes)), json.dumps(draw(structure(ONE)))
    words = [
        *(
            f"--{name} {quoted}",
            f"--{name}={quoted}",
            f"--api {quoted}",
            f"--additional-config.a.{name} {quoted}",
        ),
        f"--{name} {shlex.quote(secret)} {shlex.quote(TWO)}",
        f"--hf-overrides {shlex.quote(written)}",
        f"--model-loader-extra-config {written}",
        f"--chat-template={shlex.quote(written[:-1])}",
        f"--otlp-traces-endpoint https://me:{ONE}@host/",
    ]
    return draw(st.sampled_from(words))


@st.composite
def secret_commands(draw: st.DrawFn) -> str:
    words = draw(st.lists(st.one_of(NOISE, secret_words()), min_size=1, max_size=4))
    name, secret = draw(NAMES).replace("-", "_").replace(".", "_"), shlex.quote(draw(PIECES))
    programs = [
        *("vllm serve Q", f"{name}={secret} vllm serve Q", f"env {name}={secret} nohup vllm serve Q"),
        f"OPTIONS='--token={ONE}' vllm serve Q",
        # Refused, and not quoted in the refusal.
        *(f"{name}={ONE} {TWO} vllm serve Q", f"export {name}={secret}\nvllm serve Q"),
        *(
            f"docker run -e {name}={secret} i vllm serve Q",
            f"kubectl exec --token {secret} pod -- vllm serve Q",
        ),
    ]
    comment = draw(st.sampled_from(["", f" # {name}={ONE}"]))
    return f"{draw(st.sampled_from(programs))} {' '.join(words)}{comment}"


@settings(max_examples=150, deadline=None)
@given(secret_commands())
def test_no_command_shows_its_secrets(command):
    text = said_of(command)
    assert ONE not in text
    assert TWO not in text


@st.composite
def secret_files(draw: st.DrawFn) -> tuple[str, FileKind]:
    name, secret = draw(NAMES), json.dumps(draw(PIECES))
    held = json.dumps(draw(structure(ONE)))
    lines = [
        *(f"{name}: {secret}", f"{name}: [{secret}, {secret}]", f"{name}:\n  - {secret}\n  - x"),
        *(
            f"{name}: {secret} # {TWO}: no, {name}: {ONE}",
            f"# {name}: {secret}",
            f"{name}: |\n  {ONE}\n  {TWO}",
        ),
        *(f"{name}: &k {secret}\nother: *k", f"x: &k {secret}\n{name}: *k"),
        *(
            f"watermark-config: {{a: {secret}}}",
            f"hf-overrides: {held}",
            f"lora-modules: [{json.dumps(held)}]",
        ),
        *(f"chat-template: {json.dumps(held[:-1])}", f"args: ['--{name}', {secret}, --seed]"),
    ]
    heads = {
        FileKind.VLLM: "model: Q",
        FileKind.TRL: "use_vllm: true\ntop_p: 0.9",
        FileKind.PIPELINERL: "defaults: [base]",
    }
    kind = draw(st.sampled_from([*heads]))
    return f"{heads[kind]}\n{draw(st.sampled_from(lines))}\n", kind


@settings(max_examples=100, deadline=None)
@given(secret_files())
def test_no_file_shows_its_secrets(file):
    text = said_of(*file)
    assert ONE not in text
    assert TWO not in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "HF_TOKEN=x vllm serve Q --api-key a b -tp 2",
            f"HF_TOKEN={VALUE} vllm serve Q --api-key {VALUE} {VALUE} -tp 2",
        ),
        ("vllm serve Q --api-key=a", f"vllm serve Q --api-key={VALUE}"),
        ("vllm serve Q --api-key '$a'", f"vllm serve Q --api-key {VALUE}"),
        ("DB_PASS=a TS_AUTHKEY=b vllm serve M", f"DB_PASS={VALUE} TS_AUTHKEY={VALUE} vllm serve M"),
        ("vllm serve Q --frob https://me:pw@host/ -tp 2", f"vllm serve Q --frob {VALUE} -tp 2"),
        ("vllm serve Q # token: x", f"vllm serve Q # {HIDDEN}"),
        # The controls: what is no secret, or comes from a variable, stays as it was written.
        ('vllm serve Q --api-key "$KEY"', None),
        ('HF_TOKEN=${T} vllm serve Q --api-key="${KEY}"', None),
        ('vllm serve Q --hf-overrides \'{"eos_token_id": [1, 2], "tokens": "x"}\' # as it was', None),
        ("vllm serve Q --max-num-batched-tokens 4096 --tokenizer x --ssl-keyfile f", None),
        ("CUDA_VISIBLE_DEVICES=0,1 NCCL_DEBUG=INFO env A=1 vllm serve Q --lora-modules sql=/l -qfp8", None),
    ],
)
def test_what_a_command_looks_like_without_them(before, after):
    assert CommandLine(before).printed() == (before if after is None else after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hub_token: abc # ours\nuse_vllm: true\n", f"hub_token: {HIDDEN} # ours\nuse_vllm: true\n"),
        ("use_vllm: true\napi_keys: [a, null]\n", f"use_vllm: true\napi_keys: [{HIDDEN}, null]\n"),
        ("model: Q\nfrob: 3\ndb_pass: x\n", f"model: Q\nfrob: 3\ndb_pass: {HIDDEN}\n"),
        ("use_vllm: true\napi-key: null\napi_key_env: NAME\nmax_tokens: 3 # a token\n", None),
        ("use_vllm: true\na: &k 'b c'  # as it was\nb: *k\n", None),
    ],
)
def test_what_a_file_looks_like_without_them(before, after):
    assert open_text(before, "f.yaml", None).printed() == (before if after is None else after)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            "HF_TOKEN api-key my_secret db.password apiKey hfToken auth pass DB_PASS PGPASS REDIS_PASS dbPass",
            True,
        ),
        (
            "TS_AUTHKEY SSHKEY PRIVATEKEY accesskey HF_TOKENS access_tokens JWT SENTRY_DSN GIT_PAT COOKIES",
            True,
        ),
        ("tokenizer max-tokens monkey api_key_env seed pad_token_id author pass_config bypass path", False),
        ("ignore-patterns spec-tokens compass patch_size long-prefill-token-threshold", False),
    ],
)
def test_names_of_secrets(names, expected):
    assert {name: names_a_secret(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"t\\u006fken": "x"}', True),
        ('{"token": "x", "token": null}', True),
        ('{"a": "{\\"token\\": 1', True),
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
def test_values_that_may_hold_one(value, expected):
    assert may_hold_one(value) is expected
    assert safe(value) == (HIDDEN if expected else value)
