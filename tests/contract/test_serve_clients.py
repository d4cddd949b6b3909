"""Clients that others wrote, as they are, against `zerodrift serve`: what they read is what the engine made."""

import json
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serve"))

from serving import MODEL, serve

from zerodrift import models
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.serve.parameters import SAMPLING

HERE = Path(__file__).parent
ENGINES = HERE.parents[1] / ".engines"
VLLM, TRL, VERIFIERS = ENGINES / "vllm-0.32.0", ENGINES / "trl-1.16.0", ENGINES / "verifiers-0.4.0"
OF_QWEN = (
    "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>",
)  # fmt: skip
"""Tokens that the renderer of Qwen3 needs, and no built-in model has."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL)


def in_environment(environment, script, *arguments):
    python = environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{environment.name} is not in .engines")
    run = subprocess.run(
        [python, "-W", "ignore", HERE / script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_openai(served, engine):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        asked = {"model": MODEL, "prompt": "3+4=", "max_tokens": 5, "logprobs": 1, "seed": 1}
        [output] = engine.generate(["3+4="], SamplingParams(max_tokens=5, seed=1))
        [choice] = client.completions.create(**asked).choices
        assert (choice.text, choice.logprobs.token_logprobs) == (output.text, list(output.logprobs))
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [value for chunk in chunks for value in chunk.logprobs.token_logprobs] == list(output.logprobs)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 4, "seed": 2}
        whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=1).choices[0]
        assert len(whole.logprobs.content) == 4
        parts = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        *deltas, last = list(parts)
        assert "".join(each.choices[0].delta.content for each in deltas) == whole.message.content
        assert last.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked, echo=True)
        assert (refused.value.code, refused.value.param) == ("parameter/not-supported", "echo")


@pytest.mark.engines
@pytest.mark.trl
@pytest.mark.long  # for the environment of TRL, which no change waits for: `make trl-vllm`
def test_trl_client(served, engine):
    site = TRL / "lib" / "python3.11" / "site-packages"
    if not site.exists():
        pytest.skip("trl-1.16.0 is not in .engines")
    told = json.loads(in_environment(VLLM, "trl_client.py", served.admin_url, site).splitlines()[-1])
    prompts = [[5, 17, 300], [9, 8]]
    outputs = engine.generate(prompts, SamplingParams(n=2, max_tokens=4, seed=7))
    generated = told["generate"]
    assert generated["prompt_ids"] == prompts
    assert generated["completion_ids"] == [list(each.token_ids) for each in outputs]
    sampled = [
        [values[ids.index(token)] for values, ids, token in zip(*each, strict=True)]
        for each in zip(
            generated["logprobs"], generated["logprob_token_ids"], generated["completion_ids"], strict=True
        )
    ]
    assert sampled == [list(each.logprobs) for each in outputs]
    scored = engine.generate([[5, 6, 7, 8], [1, 2, 3]], SamplingParams(max_tokens=1, prompt_logprobs=3))
    for length, output, likeliest in zip([2, 1], scored, told["scored"]["logprobs"], strict=True):
        assert likeliest == [[top.logprob for top in tops] for tops in output.prompt_top_logprobs[length:]]
    assert (told["world_size"], told["transfer"]) == (1, {"backend": "zerodrift"})


@pytest.mark.engines
@pytest.mark.trl
@pytest.mark.long
def test_trl_trains_against_it(served, tmp_path):
    """AsyncGRPO of TRL, as it is: its own rollouts, pauses and adapter updates (docs/trl_serve_run.py)."""
    site = TRL / "lib" / "python3.11" / "site-packages"
    if not site.exists():
        pytest.skip("trl-1.16.0 is not in .engines")
    models.materialise(MODEL, tmp_path / "model")
    steps = 4
    told = in_environment(
        VLLM, "trl_async.py", site, served.admin_url, tmp_path / "model", served.root / "trl", str(steps)
    )
    lines = [line for line in json.loads(told.splitlines()[-1]) if "loss" in line]
    assert len(lines) == steps
    # What the server reported against TRL's own forward, where no token is of older weights: fp32 rounding.
    fresh = [line["kl"] for line in lines if line["sample/staleness_max"] == 0]
    assert fresh
    assert max(fresh) < 1e-6
    assert lines[-1]["sample/staleness_max"] <= 2
    loaded = [model["id"] for model in served.get("/v1/models").json["data"][1:]]
    assert loaded[-1] == f"trl-policy-v{steps + 1}"
    assert len(loaded) == 3, "what is older than the staleness allows was unloaded"
    # The tests behind this one update the base, which nothing does beside adapters.
    for name in loaded:
        assert served.admin("/v1/unload_lora_adapter", {"lora_name": name}).status == 200


@pytest.mark.engines
def test_vllms_weight_client(served):
    models.load(MODEL).save_pretrained(served.root / "step_7")
    in_environment(VLLM, "vllm_weight_client.py", served.admin_url, str(served.root / "step_7"), "step 7")
    from serving import ADMIN

    assert served.get("/weight_info", ADMIN).json["weight_version"] == "step 7"


def test_prime_rls_calls(served):
    """utils/client.py of prime-rl 559b447, by its bodies: one Bearer for all, resume in a finally, never a version."""
    models.load(MODEL).save_pretrained(served.root / "step_8")
    assert served.get("/health").status == 200
    assert served.admin("/pause?mode=keep&clear_cache=false").status == 200
    answer = served.admin("/update_weights", {"weight_dir": str(served.root / "step_8")})
    assert (answer.status, answer.json["status"]) == (200, "ok")
    assert served.admin("/resume").status == 200
    assert served.admin("/init_broadcaster", {"host": "x", "port": 1}).status == 404
    assert served.get("/liveness").status == 200


@pytest.mark.engines
def test_every_sampling_parameter_of_vllm_is_in_the_table():
    """What a release adds is honoured or refused, and never ignored."""
    path = (
        VLLM / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "vllm" / "sampling_params.py"
    )
    if not path.exists():
        pytest.skip(f"{VLLM.name} is not in .engines")
    text = path.read_text().partition("class SamplingParams(")[2].partition("def ")[0]
    assert {*re.findall(r"^    ([a-z]\w*):", text, re.MULTILINE)} == SAMPLING.keys()


def with_tokens(path, added):
    """A built-in model whose tokenizer has more of them."""
    models.materialise(MODEL, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([*added], special_tokens=True)
    tokenizer.save_pretrained(path)
    model = models.load(str(path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    return tokenizer


@pytest.mark.engines
@pytest.mark.long
def test_verifiers_train_client(tmp_path):
    """prime-rl's: it renders turns itself, the second out of the tokens of the first, and reads ids and logprobs back."""
    tokenizer = with_tokens(tmp_path / "model", OF_QWEN)
    path = str(tmp_path / "model")
    stops = tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    for served in serve(tmp_path, model=path):
        told = json.loads(in_environment(VERIFIERS, "verifiers_client.py", served.url, path).splitlines()[-1])
    for seed, turn in enumerate(told, start=1):
        sampling = SamplingParams(max_tokens=6, seed=seed, stop_token_ids=stops)
        [output] = Engine(path).generate([turn["prompt_ids"]], sampling)
        assert turn["completion_ids"] == list(output.token_ids)
        assert turn["logprobs"] == list(output.logprobs)
    first, second = told
    assert (first["bridged"], second["bridged"]) == (False, True)
    before = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(before)] == before
