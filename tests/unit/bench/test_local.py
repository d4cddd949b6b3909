"""The contenders of this process on a tiny model: same work, logprobs that mean what they say."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zerodrift.bench import generate, ours, shape
from zerodrift.bench.contender import Contender, Served, check
from zerodrift.bench.generate import GenerateContender
from zerodrift.bench.workload import Job, mixed
from zerodrift.engine.engine import Engine
from zerodrift.models.smollm2 import COMPLETE

JOBS = mixed(5, 61, 512)


def vanilla_logprobs(model: Any, job: Job, served: Served) -> torch.Tensor:
    ids = torch.tensor([[*job.prompt, *served.token_ids]])
    with torch.no_grad():
        rows = model(ids).logits[0, len(job.prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(served.token_ids)[:, None])[:, 0]


def contenders(model: Any) -> list[Contender]:
    return [ours.exact(model), ours.unconstrained(model, JOBS), GenerateContender(model, JOBS)]


def test_each_does_the_work_and_reports_the_logprobs_of_what_it_drew(tiny: Any) -> None:
    for contender in contenders(tiny):
        run = contender.run(JOBS)
        check(contender.name, JOBS, run)
        assert run.time.clock > 0
        assert run.time.processor > 0
        for job, each in zip(JOBS, run.served, strict=True):
            expected = vanilla_logprobs(tiny, job, each)
            torch.testing.assert_close(torch.tensor(each.logprobs), expected, atol=1e-4, rtol=0)
        contender.close()


def test_the_exact_one_is_exact_and_the_other_is_not(tiny: Any) -> None:
    exact, plain, _ = contenders(tiny)
    assert isinstance(exact, ours.EngineContender)
    assert isinstance(plain, ours.EngineContender)
    assert exact._engine.fingerprint().numeric["attention"].startswith("blocks-")
    assert plain._engine.fingerprint().numeric["attention"] == "sdpa"
    assert plain.setting in ours.UNCONSTRAINED_OPS
    assert type(tiny.lm_head) is torch.nn.Linear, "the vanilla model came back as it was"
    # A second round finds nothing of the first one in a cache.
    exact.run(JOBS)
    exact.run(JOBS)
    assert exact._engine.metrics().prefix_hit_rate == 0


def test_generate_takes_batches_of_alike_requests(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "BATCH_SIZES", (2, 3, 64))
    contender = GenerateContender(tiny, JOBS)
    assert contender.setting.endswith("tried 2, 3")
    sizes: list[int] = []
    original = contender._batch
    monkeypatch.setattr(contender, "_batch", lambda jobs: sizes.append(len(jobs)) or original(jobs))
    contender._serve(JOBS, 2)
    assert sizes == [2, 2, 1]
    assert GenerateContender(tiny, JOBS[:1]).setting == "batches of 1, tried 1"


def test_which_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "DEFAULT_DIRECTORY", tmp_path)
    assert shape.default_directory() is None
    (tmp_path / COMPLETE).touch()
    assert shape.default_directory() == tmp_path
    assert shape.load("testbed:llama").config.model_type == "llama"
    monkeypatch.setitem(shape.SMOLLM2, "num_hidden_layers", 1)
    model = shape.load(None)
    assert model.config.vocab_size == 49152
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert Engine(model, num_blocks=4).generate([[5]])[0].problem is None


@pytest.mark.smollm2
def test_the_shape_is_that_of_the_trained_model(request: pytest.FixtureRequest) -> None:
    directory = request.config.rootpath / ".cache" / "smollm2"
    if not (directory / COMPLETE).is_file():
        pytest.skip("no trained weights in .cache/smollm2; run `make smollm2`")
    from transformers import AutoConfig

    real = AutoConfig.from_pretrained(directory).to_dict()
    assert {name: real[name] for name in shape.SMOLLM2} == shape.SMOLLM2
