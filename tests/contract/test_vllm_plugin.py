"""The plugin without vLLM: modules of its name stand in for the few names that the plugin takes from it.

What real servers do with it is in tests/engines/test_vllm_plugin.py; here is what cannot be had from them: an update
that breaks off while it is applied.
"""

import ast
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

SOURCES = Path(__file__).parents[2] / "integrations" / "vllm_plugin" / "src"
A = {
    "embed.weight": torch.zeros(4, 2),
    "layers.0.q.weight": torch.zeros(2, 2),
    "layers.0.k.weight": torch.zeros(2, 2),
    "lm_head.weight": torch.zeros(4, 2),
}


class WeightTransferEngine(ABC):
    """As vLLM's: it keeps what it was made with, and makes dataclasses of dicts."""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Of 0.26 alone: an engine that lacks it ends the server at its start."""

    def __class_getitem__(cls, parameters: object) -> type:
        return cls

    def __init__(self, config: object, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.model_config, self.device, self.model = vllm_config.model_config, device, model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


class Factory:
    registered: dict[str, tuple[str, str]]

    @classmethod
    def register_engine(cls, name: str, module: str, attribute: str) -> None:
        if name in cls.registered:
            raise ValueError(f"{name} is already registered")
        cls.registered[name] = (module, attribute)


class TrainerFactory(Factory):
    pass


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine:
    def __class_getitem__(cls, parameters: object) -> type:
        return cls

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class ParamMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """As vLLM's: yields tensors, and says before which they are; `declares` may say another thing."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], declares: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.tensors, self.declares, self.passes = tensors, tensors if declares is None else declares, 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.declares.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        return iter(self.tensors.items())


class Client:
    """Hands what it is told to a transfer engine of this process, as a server does, and keeps the version's label."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.told, self.label = engine, [], "default"

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.told.append(init_info)
        self.engine.init_transfer_engine(self.engine.init_info_cls(**init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.told.append(sorted(path.name for path in Path(update_info["directory"]).iterdir()))
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.label = weight_version or self.label


class Model:
    """Takes tensors into `state`; fails at the name in `fails_at`, and ignores the one in `ignores`."""

    def __init__(self) -> None:
        self.state = {name: tensor.clone() for name, tensor in A.items()}
        self.fails_at = self.ignores = ""
        self.phases: list[str] = []

    def named_parameters(self, *, remove_duplicate: bool) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.state.items())

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in tensors:
            if name == self.fails_at:
                raise RuntimeError("no memory")
            if name != self.ignores:
                self.state[name] = tensor
                loaded.add(name)
        return loaded


@pytest.fixture
def plugin(monkeypatch):
    base = ModuleType("vllm.distributed.weight_transfer.base")
    base.__dict__.update(
        WeightTransferEngine=WeightTransferEngine,
        WeightTransferInitInfo=object,
        WeightTransferUpdateInfo=object,
        TrainerInitInfo=TrainerInitInfo,
        TrainerWeightTransferEngine=TrainerWeightTransferEngine,
        ParamMeta=ParamMeta,
        VLLMWeightSyncClient=object,
        WeightSource=object,
    )
    package = ModuleType("vllm.distributed.weight_transfer")
    package.__dict__.update(WeightTransferEngineFactory=Factory, WeightTransferTrainerFactory=TrainerFactory)
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.__dict__.update(
        initialize_layerwise_reload=lambda model: model.phases.append("initialised"),
        finalize_layerwise_reload=lambda model, config: model.phases.append("finalised"),
    )
    names = ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader")
    for module in (*map(ModuleType, names), package, base, reload):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(SOURCES))
    Factory.registered, TrainerFactory.registered = {}, {}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "zerodrift_vllm"]:
        del sys.modules[name]


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def moved(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in A.items()} | changes


@pytest.fixture
def engine(plugin, tmp_path):
    return opened(written(tmp_path / "A", A))


def opened(model: str, *, tied: bool = False) -> Any:
    from zerodrift_vllm.transfer import DirectoryTransfer

    hf = SimpleNamespace(tie_word_embeddings=tied)
    config = SimpleNamespace(model=model, quantization=None, hf_config=hf)
    return DirectoryTransfer(None, SimpleNamespace(model_config=config), torch.device("cpu"), Model())


def push(engine: Any, directory: str, names: list[str] | None = None) -> None:
    engine.start_weight_update()
    engine.update_weights({"directory": directory, "names": names})
    engine.finish_weight_update()


def test_registering_twice_is_once(plugin):
    from zerodrift_vllm import register

    register()
    register()
    assert Factory.registered == {"zerodrift": ("zerodrift_vllm.transfer", "DirectoryTransfer")}
    assert TrainerFactory.registered == {"zerodrift": ("zerodrift_vllm.trainer", "DirectoryTrainer")}


def test_a_vllm_without_trainers_engines_has_the_other_half(plugin, monkeypatch):
    from zerodrift_vllm import register

    monkeypatch.delattr(sys.modules["vllm.distributed.weight_transfer"], "WeightTransferTrainerFactory")
    register()
    assert list(Factory.registered) == ["zerodrift"]


def test_a_vllm_without_transfer_engines_goes_on(plugin, monkeypatch):
    from zerodrift_vllm import register

    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    register()
    assert Factory.registered == {}


def test_a_trainer_that_would_send_tensors_is_told_what_to_do(engine):
    with pytest.raises(NotImplementedError, match="writes a directory, and posts its path"):
        engine.trainer_send_weights(iter(()), {})


def test_a_whole_update_arrives(engine, tmp_path):
    push(engine, written(tmp_path / "B", moved()))
    assert all((tensor == 1).all() for tensor in engine.model.state.values())
    assert engine.model.phases == ["initialised", "finalised"]


def test_shards_are_read_by_their_index(engine, tmp_path):
    b = tmp_path / "B"
    b.mkdir()
    parts = list(moved().items())
    weight_map = {}
    for number, part in enumerate((parts[:2], parts[2:])):
        save_file(dict(part), b / f"{number}.safetensors")
        weight_map |= {name: f"{number}.safetensors" for name, _ in part}
    (b / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    push(engine, str(b))
    assert all((tensor == 1).all() for tensor in engine.model.state.values())


INDEX = "model.safetensors.index.json"
TWICE = {"weight_map": {"embed.weight": "0.safetensors", "x": "1.safetensors"}}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"model.bin": "x", "pytorch_model.bin.index.json": "{}"},
        {"model.safetensors": "x"},
        {INDEX: "[]"},
        {INDEX: '{"weight_map": {"a": "../A/model.safetensors"}}'},
        {INDEX: '{"weight_map": {"a": "a.bin"}}'},
        {INDEX: '{"weight_map": {"a": "a.safetensors"}}'},
        {INDEX: json.dumps(TWICE)},
    ],
    ids=str,
)
def test_only_a_directory_of_safetensors_is_read(engine, tmp_path, files):
    b = tmp_path / "B"
    b.mkdir()
    for name, text in files.items():
        (b / name).write_text(text)
    if files == {INDEX: json.dumps(TWICE)}:
        for number in (0, 1):
            save_file({"embed.weight": A["embed.weight"]}, b / f"{number}.safetensors")
    engine.start_weight_update()
    with pytest.raises(ValueError, match=str(b)):
        engine.update_weights({"directory": str(b)})
    assert engine.model.phases == []


def test_one_tensor_is_not_sent_twice(engine, tmp_path):
    b = written(tmp_path / "B", moved())
    engine.start_weight_update()
    engine.update_weights({"directory": b, "names": ["embed.weight"]})
    with pytest.raises(ValueError, match=r"sent twice in one update: embed\.weight"):
        engine.update_weights({"directory": b})


def test_an_update_that_breaks_off_is_no_success_and_the_last(engine, tmp_path):
    """vLLM keeps such an update open and advises to finish it: with what is left of the first try, tensors would be
    counted twice and layers called complete that are not."""
    b = written(tmp_path / "B", moved())
    engine.model.fails_at = "layers.0.q.weight"
    with pytest.raises(RuntimeError, match="no memory"):
        push(engine, b)
    # Layers stay without memory: the next request fails, instead of being answered by a mixture.
    assert engine.model.phases == ["initialised"]
    engine.model.fails_at = ""
    with pytest.raises(RuntimeError, match="neither the old nor the new one; restart"):
        engine.finish_weight_update()
    with pytest.raises(RuntimeError, match="restart the server"):
        engine.start_weight_update()


def test_a_parameter_that_no_tensor_reached_is_no_success(engine, tmp_path):
    engine.model.ignores = "layers.0.k.weight"
    with pytest.raises(
        RuntimeError, match=r"1 parameters of the model were not loaded, layers\.0\.k\.weight"
    ):
        push(engine, written(tmp_path / "B", moved()))
    assert engine.model.phases == ["initialised"]


def test_files_that_are_replaced_meanwhile_are_read_as_they_were(engine, tmp_path):
    b = written(tmp_path / "B", moved())
    engine.start_weight_update()
    engine.update_weights({"directory": b})
    (tmp_path / "B" / "model.safetensors").unlink()
    written(tmp_path / "B", {name: tensor + 7 for name, tensor in A.items()})
    engine.finish_weight_update()
    assert all((tensor == 1).all() for tensor in engine.model.state.values())


def test_a_tied_head_may_be_left_out(plugin, tmp_path):
    a = written(tmp_path / "A", A)
    b = written(
        tmp_path / "B", {name: tensor for name, tensor in moved().items() if name != "lm_head.weight"}
    )
    engine = opened(a)
    with pytest.raises(ValueError, match=r"missing in .*: lm_head\.weight \(1 in all\)"):
        push(engine, b)
    tied = opened(a, tied=True)
    del tied.model.state["lm_head.weight"]
    push(tied, b)
    assert (tied.model.state["embed.weight"] == 1).all()


class TiedModel(Model):
    """As vLLM's: the head's weight is the embedding's, apart while a reload lasts, and packed when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.state["lm_head.weight"] = self.state["embed.weight"]
        self.packed = self.state["lm_head.weight"].clone()
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda _: self.pack())

    def pack(self) -> None:
        self.packed = self.state["lm_head.weight"].clone()

    def get_submodule(self, name: str) -> Any:
        assert name == "lm_head"
        return self

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self.state["lm_head.weight"] = torch.empty(0)
        loaded = super().load_weights(tensors)
        if "lm_head.weight" not in loaded:
            self.state["lm_head.weight"] = self.state["embed.weight"]
        return loaded


@pytest.mark.parametrize("ignored", ["", "embed.weight"])
def test_the_other_end_of_a_tie_arrives_with_the_one_that_is_sent(plugin, tmp_path, ignored):
    """On a CPU vLLM packs a head once: one that is not packed again answers with the old weights."""
    a = {name: tensor for name, tensor in A.items() if name != "lm_head.weight"}
    engine = opened(written(tmp_path / "A", a), tied=True)
    engine.model = TiedModel()
    engine.model.ignores = ignored
    b = written(tmp_path / "B", {name: tensor + 1 for name, tensor in a.items()})
    if ignored:
        with pytest.raises(RuntimeError) as caught:
            push(engine, b)
        assert "embed.weight" in str(caught.value)
        return
    push(engine, b)
    assert (engine.model.packed == 1).all()


def test_a_model_that_is_served_by_its_name_is_known_by_init(plugin, tmp_path):
    engine = opened("org/name")
    engine.init_transfer_engine(engine.init_info_cls())
    with pytest.raises(ValueError, match=r"org/name is no directory .*init_info"):
        engine.start_weight_update()
    engine.init_transfer_engine(engine.init_info_cls(checkpoint=written(tmp_path / "A", A)))
    push(engine, written(tmp_path / "B", moved()))
    assert (engine.model.state["embed.weight"] == 1).all()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.bias", "model.norm"),
        ("scale", ""),
    ],
)
def test_what_must_come_together(plugin, name, part):
    from zerodrift_vllm.update import part as part_of

    assert part_of(name) == part


@pytest.fixture
def exchange(tmp_path):
    (tmp_path / "exchange").mkdir()
    return tmp_path / "exchange"


def trainer_of(engine: Any, exchange: Path, source: Source | None, rank: int = 0, **named: str) -> Any:
    from zerodrift_vllm.trainer import DirectoryTrainer, DirectoryTrainerInitInfo

    info = DirectoryTrainerInitInfo(str(exchange), **named, rank=rank)
    return DirectoryTrainer.trainer_init(info, client=Client(engine), source=source)


def test_a_trainer_sends_in_shards_and_leaves_nothing_behind(engine, exchange, monkeypatch):
    trainer = trainer_of(engine, exchange, Source(moved()))
    monkeypatch.setattr("zerodrift_vllm.trainer.SHARD_BYTES", 40)
    trainer.send_weights()
    assert trainer.client.label == "round-1"
    assert trainer.client.told[1] == [
        *(f"model-{n:05d}.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert all((tensor == 1).all() for tensor in engine.model.state.values())
    assert list(exchange.iterdir()) == []
    trainer.send_weights("step 7")
    assert trainer.client.label == "step 7"


def test_other_ranks_gather_along_and_say_nothing(engine, exchange):
    source = Source(moved())
    trainer = trainer_of(engine, exchange / "not seen by this rank", source, rank=1)
    trainer.send_weights()
    assert (source.passes, trainer.client.told) == (1, [])


@pytest.mark.parametrize(
    "source",
    [
        Source(moved(), declares=A | {"other.weight": torch.zeros(1)}),
        Source(moved() | {"other.weight": torch.zeros(1)}, declares=A),
        Source(moved() | {"embed.weight": torch.zeros(4, 2).half()}, declares=A),
        Source({name: tensor for name, tensor in moved().items() if "layers" not in name}),
        Source({}),
    ],
)
def test_a_source_that_is_not_the_model_changes_nothing(engine, exchange, source):
    trainer = trainer_of(engine, exchange, source)
    with pytest.raises(ValueError, match=r"declares|missing in|no tensors"):
        trainer.send_weights("lost")
    assert trainer.client.label == "default"
    assert all((tensor == 0).all() for tensor in engine.model.state.values())
    assert list(exchange.iterdir()) == []


def test_a_trainer_without_a_source_or_a_place_is_refused(engine, exchange):
    for place, source in ((exchange, None), (exchange / "none", Source(A))):
        with pytest.raises(ValueError, match=r"nothing to send|no directory"):
            trainer_of(engine, place, source)


def test_it_needs_nothing_that_vllm_does_not_bring():
    """And nothing that runs code out of a file."""
    imported = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    own = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert own == {"vllm", "torch", "safetensors", "zerodrift_vllm"}
    assert not imported & {"pickle", "marshal", "subprocess"}


@pytest.mark.parametrize(
    ("has_amx", "given", "warned"), [(True, True, 0), (True, False, 1), (False, False, 0)]
)
def test_leave_to_use_amx_is_asked_for_in_every_process(plugin, monkeypatch, caplog, has_amx, given, warned):
    """Else vLLM's worker ends by an illegal instruction in bf16."""
    from zerodrift_vllm import register

    asked = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(1) or given)
    register()
    assert (len(asked), len(caplog.records)) == (int(has_amx), warned)
