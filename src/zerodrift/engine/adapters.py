"""LoRA adapters that an engine has loaded: by name, beside weights that do not change while one is there.

An adapter is loaded and unloaded between two steps. Requests ask for one by name and keep it to their end: one that is in use
is not unloaded, or it is kept for those requests alone and its name is free. What runs is known by its version, never by its name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerodrift.core.errors import AdapterInUse, DuplicateAdapter, InvalidValue, ModelError, UnknownAdapter
from zerodrift.core.version import AdapterVersion
from zerodrift.engine.runner import Runner
from zerodrift.engine.scheduler import Scheduler
from zerodrift.engine.weights import try_out
from zerodrift.exact.lora import LoraAdapter, RowGroup, applied
from zerodrift.exact.peft_model import lora_layers, of_peft, pairs_in, set_aside, unwrapped
from zerodrift.models.lora import LoraPairs, pairs_of, read_adapter
from zerodrift.weights.digest import model_digest

AdapterSource = str | Path | Mapping[str, torch.Tensor] | Any
"""A directory that PEFT wrote, a PEFT model, or the tensors of one (get_peft_model_state_dict) with its config."""


def _pairs(source: AdapterSource, config: Any, base: str) -> LoraPairs:
    if isinstance(source, Mapping):
        if config is None:
            raise InvalidValue(
                "tensors of an adapter came without its config; give config=model.peft_config[NAME]"
            )
        settings = config.to_dict() if hasattr(config, "to_dict") else config
        return pairs_of(source, settings, "the adapter")
    if config is not None:
        raise InvalidValue("a directory or a model of PEFT has its own config; leave config out")
    if isinstance(source, (str, Path)):
        return read_adapter(Path(source))
    if not of_peft(source):
        raise InvalidValue(
            f"an adapter is a {type(source).__name__}; give a directory that PEFT wrote, a PEFT model, or tensors and config"
        )
    inner = unwrapped(source)
    with set_aside(inner, lora_layers(inner)):
        trained_on = model_digest(inner)
    if trained_on != base:
        raise ModelError(
            f"the adapter was trained beside weights {trained_on[:12]}, and the engine has {base[:12]}; give the engine that "
            "base first (swap_weights), or another adapter"
        )
    return pairs_in(source)


class Adapters:
    """Those of one engine; changed by `Engine.load_adapter` and `Engine.unload_adapter` alone."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        """None yet."""
        self._scheduler, self._model = scheduler, runner.model
        self._named: dict[str, AdapterVersion] = {}
        self._held: dict[AdapterVersion, LoraAdapter] = {}
        """Those that have a name, and those that a request in flight still runs with."""
        runner.adapters = self._held

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        """What requests may ask for, by name."""
        return tuple(self._named.values())

    def staged(self, name: str, source: AdapterSource, config: Any = None) -> LoraAdapter:
        """Read and verified beside what runs. Any thread may, at any time."""
        AdapterVersion(name, "")  # a name that nobody could ask for is refused before anything is read
        return LoraAdapter(self._model, name, _pairs(source, config, self._base), self._base)

    @property
    def _base(self) -> str:
        return self._scheduler.version.digest or self._scheduler.version.label

    def load(self, adapter: LoraAdapter, *, replace: bool = False, most: int | None = None) -> AdapterVersion:
        """From now on requests may ask for it; tried on a few tokens first. Nothing changes where that is refused."""
        name = adapter.version.name
        if name in self._named and not replace:
            raise DuplicateAdapter(
                f"an adapter {name!r} is loaded with digest {self._named[name].digest[:12]}; unload it first, or give "
                "each version its own name"
            )
        if adapter.base != self._base:
            raise ModelError(f"weights were swapped while adapter {name!r} was read; load it again")
        self._let_go()
        if most is not None and adapter.version not in self._held and len(self._held) >= most:
            raise AdapterInUse(
                f"{len(self._held)} adapters are loaded, or held by requests in flight, and {most} are allowed; unload one first"
            )
        with applied(self._model, [RowGroup(adapter, None)]):
            try_out(self._model)
        self._named[name], self._held[adapter.version] = adapter.version, adapter
        self._let_go()
        return adapter.version

    def unload(self, name: str, in_use: str) -> None:
        """Nobody may ask for it any more. `in_use`: "refuse" where a request has it, or "keep" it for that request."""
        if in_use not in ("refuse", "keep"):
            raise InvalidValue(
                f"in_use is {in_use!r}; an adapter that requests have is to 'refuse' or to 'keep'"
            )
        version = self.require(name)
        users = sorted({each.request_id for each in self._scheduler.samples if each.lora == version})
        if users and in_use == "refuse":
            raise AdapterInUse(
                f"adapter {name!r} is in use by {len(users)} requests, {users[0]!r} among them; let them end, or abort them"
            )
        del self._named[name]
        self._let_go()

    def _let_go(self) -> None:
        """Of those that have lost their name and whose last request has ended."""
        wanted = {*self._named.values()} | {each.lora for each in self._scheduler.samples}
        for version in self._held.keys() - wanted:
            del self._held[version]

    def require(self, name: str | None) -> AdapterVersion | None:
        """The version that is loaded under `name`; None for none."""
        if name is None:
            return None
        if name not in self._named:
            raise UnknownAdapter(
                f"no adapter {name!r:.80} is loaded; loaded are {', '.join(map(repr, sorted(self._named))) or 'none'}"
            )
        return self._named[name]

    def require_same(self, version: AdapterVersion | None) -> None:
        """What a request was checked with is loaded still: between the two another thread may have unloaded it."""
        if version is not None and version not in self._held:
            raise UnknownAdapter(
                f"adapter {version.name!r} with digest {version.digest[:12]} is not loaded; another may have its name"
            )

    def require_none(self) -> None:
        """Before weights are swapped: an adapter beside another base is another model under the same name."""
        self._let_go()
        if self._held:
            names = sorted({version.name for version in self._held})
            raise AdapterInUse(
                f"adapters {', '.join(map(repr, names))} stand beside the weights that were to be swapped; "
                "unload them first"
            )

    def over_all(self, version: AdapterVersion | None) -> list[RowGroup]:
        """For a forward whose every row runs with this one."""
        return [] if version is None else [RowGroup(self._held[version], None)]
