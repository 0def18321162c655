"""save_similarities and load_similarities: the similarities of a model in a file of their own."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ahop_layers import files
from ahop_layers.convert.class_swap import original_class
from ahop_layers.convert.registry import full_name
from ahop_layers.errors import AHopError, check_module
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, check_state, unchanged_on_error
from ahop_layers.similarity.associator import Associator, named_similarities

_KEY = "ahop_layers.similarities"


def save_similarities(model: nn.Module, path: str | Path) -> None:
    """Saves the similarities of a model in the safetensors format, and the learned separations if it has any.

    The file has a few kilobytes: the weights of the similarities, and for each the class of its layer, its class,
    bases, blocks and number of heads. It replaces an older one when it is complete. Needs
    ``pip install ahop-layers[save]``.

    >>> import tempfile, torch, ahop_layers as ah
    >>> models = [nn.TransformerEncoderLayer(16, 2, 32), nn.TransformerEncoderLayer(16, 2, 32)]
    >>> for model in models:
    ...     report = ah.adapt_(model, blocks=4)
    >>> with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    ...     _ = models[0].self_attn.similarity.w.fill_(0.5)
    ...     ah.save_similarities(models[0], f"{folder}/similarities.safetensors")
    ...     ah.load_similarities(models[1], f"{folder}/similarities.safetensors")
    >>> models[1].self_attn.similarity.w.unique()
    tensor([0.5000], grad_fn=<Unique2Backward0>)
    """
    parts = _learned_parts(model)
    files.write(files.as_path(path), _KEY, _state(parts), _describe(model, parts))


def load_similarities(model: nn.Module, path: str | Path) -> None:
    """Loads the similarities that :func:`save_similarities` saved.

    The adaptive layers of ``model`` must have the same names and classes, and similarities of the same shapes, except
    that ``blocks="auto"`` takes over the number of blocks. Otherwise an :class:`~ahop_layers.AHopError` is raised, and
    the model is unchanged.

    >>> import tempfile, ahop_layers as ah
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ah.save_similarities(ah.AdaptiveAttention(8, 2), f"{folder}/weights.safetensors")
    ...     ah.load_similarities(ah.AdaptiveAttention(8, 2), f"{folder}/weights.safetensors")
    """
    parts = _learned_parts(model)
    tensors, saved = files.read(files.as_path(path), _KEY, "save_similarities")
    with unchanged_on_error(nn.ModuleList(parts.values())):
        _load(model, parts, tensors, saved)


def _load(model: nn.Module, parts: dict[str, nn.Module], tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Loads the parts of a model; raises unless the file describes these parts."""
    for name, part in parts.items():
        weights = tensors.get(_join(name, "w"))
        if isinstance(part, AdaptiveSimilarity) and part.takes_blocks and weights is not None and weights.ndim:
            part.take_blocks_(weights.shape[-1])
    own = _describe(model, parts)
    for name in {**saved, **own}:
        if name not in own or name not in saved:
            where = "the model" if name in own else "the file"
            raise AHopError(f"the file must have the similarities of the model, got {name} in {where} only")
        if saved[name] != own[name]:
            raise AHopError(f"{name} must be {own[name]} as in the model, got {saved[name]}")
    for name, tensor in _state(parts).items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            got = str(tuple(tensors[name].shape)) if name in tensors else "none"
            raise AHopError(f"{name} must have the shape {tuple(tensor.shape)}, got {got}")
    for name, part in parts.items():
        check_state(part, tensors, _join(name, ""))
        part.load_state_dict({key: tensors[_join(name, key)] for key in part.state_dict()})


def _learned_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the similarities and the separations with parameters, by name."""
    check_module(model=model)
    parts = named_similarities(model)
    if not parts:
        raise AHopError(f"model must have similarities: call adapt_ first, got {type(model).__name__} without any")
    if any(is_lazy(parameter) for part in parts.values() for parameter in part.parameters()):
        raise AHopError("the similarities must have known shapes: call the model once first")
    for name, layer in model.named_modules():
        separation = getattr(layer, "separation", None) if isinstance(layer, Associator) else None
        if isinstance(separation, nn.Module) and any(True for _ in separation.parameters()):
            parts[_join(name, "separation")] = separation
    return parts


def _state(parts: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {_join(name, key): value for name, part in parts.items() for key, value in part.state_dict().items()}


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _describe(model: nn.Module, parts: dict[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Returns the layer, the class and the options of each part, as values of JSON."""
    owners = [layer for layer in model.modules() if isinstance(layer, Associator)]
    kinds = {owner: original_class(owner) for owner in owners}
    names = {owner: full_name(type(owner) if kind is None else kind.source) for owner, kind in kinds.items()}
    layers = {id(part): names[owner] for owner in owners for part in owner.modules()}
    described: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        described[name] = {"layer": layers.get(id(part)), "class": full_name(type(part))}
        if isinstance(part, AdaptiveSimilarity):
            described[name] |= {"dim": part.dim, "num_heads": part.num_heads, "bases": part.base_names()}
            described[name]["blocks"] = part.blocks.short()
    return described
