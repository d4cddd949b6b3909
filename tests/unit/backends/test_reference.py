import pytest
import torch
from safetensors.torch import load_file

from zerodrift import models
from zerodrift.backends.reference import TINY_PARAMETERS, ReferenceBackend, load_reference
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import ModelError, ModelNotFound, TruncatedWeights
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.models import testbed, tokenizer_testbed
from zerodrift.models.export import materialise
from zerodrift.weights.digest import model_digest
from zerodrift.weights.listing import manifest_of

REQUEST = Request(Prompt((20, 30, 40)), SamplingParams(seed=1, max_tokens=4))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The built-in llama after a step of training: every weight moved a little."""
    directory = materialise("testbed:llama", tmp_path_factory.mktemp("trained"))
    model = testbed.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(directory)
    return directory


def test_tiny_models_run_in_fp64_and_others_in_what_is_asked_for():
    assert load_reference("testbed:llama").model.dtype is torch.float64
    assert load_reference("testbed:llama", "float32").model.dtype is torch.float32
    assert load_reference("testbed:llama", "bfloat16").model.dtype is torch.bfloat16
    model = load_reference("testbed:qwen3").model
    assert sum(parameter.numel() for parameter in model.parameters()) < TINY_PARAMETERS


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_a_digest_is_that_of_the_checkpoint_whatever_the_model_computes_in(saved, tmp_path):
    models.load("testbed:llama", saved).save_pretrained(tmp_path)
    files = manifest_of(load_file(tmp_path / "model.safetensors")).digest
    loaded = {dtype: load_reference(tmp_path, dtype) for dtype in (None, "float32", "bfloat16")}
    assert {each.digest for each in loaded.values()} == {files}
    assert [str(each.model.dtype) for each in loaded.values()] == [
        "torch.float64",
        "torch.float32",
        "torch.bfloat16",
    ]


def test_rotary_frequencies_keep_their_precision_in_a_narrower_model():
    narrow = load_reference("testbed:llama", "bfloat16").model
    assert narrow.model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_model_that_is_not_tiny_runs_in_fp32(monkeypatch):
    monkeypatch.setattr("zerodrift.backends.reference.TINY_PARAMETERS", 1000)
    assert load_reference("testbed:llama").model.dtype is torch.float32


def test_a_completion_says_which_weights_made_it(reference):
    (completion,) = reference.generate([REQUEST])[0].completions
    version = reference.version
    assert version == WeightVersion("initial", model_digest(models.load("testbed:llama")))
    assert completion.versions == (VersionSpan(version, 0, 4),)
    assert completion.lineage == (LineageSegment(version, 0, 6),)
    assert completion.fingerprint == reference.fingerprint().digest
    assert completion.text == reference.tokenizer.decode(completion.token_ids)


def test_the_fingerprint_says_what_the_model_says(reference):
    fingerprint = reference.fingerprint()
    assert fingerprint.numeric["dtype"] == "float64"
    assert fingerprint.semantic["logprobs_mode"] == "processed_logprobs"
    assert fingerprint.semantic["weights"] == reference.version.digest
    raw = ReferenceBackend("testbed:llama", kind=LogprobKind.RAW, dtype="float32").fingerprint()
    assert raw.semantic["logprobs_mode"] == "raw_logprobs"
    assert raw.numeric["dtype"] == "float32"


def test_new_weights_are_all_new(trained):
    engine = ReferenceBackend("testbed:llama")
    before = engine.generate([REQUEST])[0].completions[0]
    engine.load_weights(trained, WeightVersion("step-1"))
    after = engine.generate([REQUEST])[0].completions[0]
    fresh = ReferenceBackend(trained)
    assert engine.version == WeightVersion("step-1", fresh.version.digest)
    assert engine.version.digest != before.versions[0].version.digest
    assert engine.model.dtype is torch.float64
    assert not engine.model.training
    assert after.logprobs == fresh.generate([REQUEST])[0].completions[0].logprobs
    assert after.logprobs != before.logprobs
    assert engine.score([(5, 6, 7)]) == fresh.score([(5, 6, 7)])


@pytest.mark.parametrize("damage", ["gone", "truncated", "another"])
def test_an_update_that_fails_changes_nothing(tmp_path, damage):
    engine = ReferenceBackend("testbed:llama")
    before, version = engine.generate([REQUEST]), engine.version
    directory, error = tmp_path / "update", ModelNotFound
    if damage == "truncated":
        materialise("testbed:llama", directory)
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        error = TruncatedWeights
    if damage == "another":
        materialise("testbed:qwen3", directory)
        error = ModelError
    with pytest.raises(error):
        engine.load_weights(directory, WeightVersion("step-1"))
    assert engine.version == version
    assert engine.generate([REQUEST]) == before


def test_text_and_chat_become_the_ids_of_the_checkpoint(reference):
    tokenizer = tokenizer_testbed.build("llama")
    assert reference.tokenize("The keeper counted.") == tuple(tokenizer("The keeper counted.")["input_ids"])
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert reference.render_chat(messages) == tuple(tokenizer(text)["input_ids"])
    assert reference.tokenizer.decode(reference.render_chat(messages)).endswith("<|im_start|>assistant\n")
