"""Any other causal language model of transformers: what its modules show about themselves, for auditing.

Nothing is guessed: a part that is not found under a name that says what it is stays None, and what would need it is
reported as not asked.
"""

from typing import Any

from zerodrift.models.family.base import AttentionPlaces, Family, MlpPlaces

_NORM = ("norm", "ln_")
_ACTIVATIONS = ("act_fn", "activation_fn", "act")
_ROLES = ("q", "k", "v", "o", "gate", "up", "down")


def describe(model: Any) -> Family:
    """As much of a description as can be read off the module tree."""
    paths = {id(module): path for path, module in model.named_modules()}
    root = paths.get(id(model.base_model)) or None
    below = "" if root is None else f"{root}."

    def place(module: Any) -> str | None:
        path = paths.get(id(module))
        return None if not path else path.removeprefix(below)

    layers = _layers(model)
    layer = None if layers is None else layers[0]
    return Family(
        name=type(model).__name__,
        model_type=model.config.model_type,
        prefix="",
        decoder=root,
        embedding=place(model.get_input_embeddings()),
        layers=place(layers),
        final_norm=_final_norm(model.base_model),
        rotary=_rotary(model.base_model),
        head=paths.get(id(model.get_output_embeddings())),
        attention=_attention(layer),
        mlp=_mlp(layer),
        norms=_norms(layer),
    )


def _layers(model: Any) -> Any:
    """The list of modules that is as long as the model is deep."""
    depth = getattr(model.config, "num_hidden_layers", None)
    for module in model.base_model.modules():
        if type(module).__name__ == "ModuleList" and len(module) == depth:
            return module
    return None


def _final_norm(decoder: Any) -> str | None:
    names = [name for name, _ in decoder.named_children() if any(word in name for word in _NORM)]
    return names[-1] if names else None


def _rotary(decoder: Any) -> str | None:
    for path, module in decoder.named_modules():
        if path and any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            return str(path)
    return None


def _norms(layer: Any) -> tuple[str, ...]:
    """Inside a layer, heads' own included."""
    if layer is None:
        return ()
    return tuple(path for path, module in layer.named_modules() if path and "Norm" in type(module).__name__)


def _attention(layer: Any) -> AttentionPlaces | None:
    holder, found = _holder(layer, ("q", "k", "v"))
    return None if holder is None else AttentionPlaces(place=holder, projections=found)


def _mlp(layer: Any) -> MlpPlaces | None:
    holder, found = _holder(layer, ("gate", "up"))
    if holder is None:
        return None
    return MlpPlaces(place=holder, projections=found, activation=_activation(layer.get_submodule(holder)))


def _activation(dense: Any) -> str | None:
    """The one module without tensors that is called an activation."""
    bare = [
        name
        for name, child in dense.named_children()
        if name in _ACTIVATIONS and not any(True for _ in child.parameters())
    ]
    return bare[0] if len(bare) == 1 else None


def _holder(layer: Any, roles: tuple[str, ...]) -> tuple[str | None, dict[str, str]]:
    """The first module that has all of `roles` as linears under their usual names."""
    for path, module in () if layer is None else layer.named_modules():
        names = {name for name, child in module.named_children() if hasattr(child, "weight")}
        found = {role: f"{role}_proj" for role in _ROLES if f"{role}_proj" in names}
        if path and set(roles) <= set(found):
            return str(path), found
    return None, {}
