"""Saved models: similarities alone, and adapted models in the format of transformers, the hub or timm."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ahop_layers import files
from ahop_layers.convert.adapt import adapted_modules, exempt_from_decay, naming, outermost
from ahop_layers.convert.class_swap import original_class
from ahop_layers.convert.copies import find_copies
from ahop_layers.convert.find import call_converter
from ahop_layers.convert.registry import Converter, converter_for, full_name
from ahop_layers.errors import AHopError, check_module
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import (
    AdaptiveSimilarity,
    Associator,
    SimilarityOptions,
    SimilaritySource,
    check_state,
    named_similarities,
)
from ahop_layers.similarity.blocks import Blocks

_KEY = "ahop_layers.similarities"
WEIGHTS, SIMILARITIES, ADAPTED = "model.safetensors", "similarities.safetensors", "adapted.json"
VERSION = 1


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
    parts = similarity_parts(model)
    files.write(files.as_path(path), _KEY, _state(parts), _describe(model, parts))


def load_similarities(model: nn.Module, path: str | Path) -> None:
    """Loads the similarities that :func:`save_similarities` saved.

    The adaptive layers of ``model`` must have the same names and classes, and similarities of the same shapes.
    Otherwise an :class:`~ahop_layers.AHopError` is raised, and the model is unchanged.

    >>> import tempfile, ahop_layers as ah
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ah.save_similarities(ah.AdaptiveAttention(8, 2), f"{folder}/weights.safetensors")
    ...     ah.load_similarities(ah.AdaptiveAttention(8, 2), f"{folder}/weights.safetensors")
    """
    parts = similarity_parts(model)
    tensors, saved = files.read(files.as_path(path), _KEY, "save_similarities")
    own = _describe(model, parts)
    for name in {**saved, **own}:
        if name not in own or name not in saved:
            where = "the model" if name in own else "the file"
            raise AHopError(f"the file must have the similarities of the model, got {name} in {where} only")
        if saved[name] != own[name]:
            expected, got = (
                ", ".join(f"{k} {v}" for k, v in each.items()) if isinstance(each, dict) else repr(each)
                for each in (own[name], saved[name])
            )
            raise AHopError(f"{name} must be {expected} as in the model, got {got}")
    for name, tensor in _state(parts).items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            got = str(tuple(tensors[name].shape)) if name in tensors else "none"
            raise AHopError(f"{name} must have the shape {tuple(tensor.shape)}, got {got}")
    for name, part in parts.items():
        check_state(part, tensors, _join(name, ""))
    for name, part in parts.items():
        part.load_state_dict({key: tensors[_join(name, key)] for key in part.state_dict()})


def similarity_parts(model: nn.Module) -> dict[str, nn.Module]:
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
    """Returns what each part belongs to, as values of JSON."""
    owners = [layer for layer in model.modules() if isinstance(layer, Associator)]
    layers = {id(part): full_name(original_class(owner) or type(owner)) for owner in owners for part in owner.modules()}
    described: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        described[name] = {"layer": layers.get(id(part)), "class": full_name(type(part))}
        if isinstance(part, AdaptiveSimilarity):
            described[name] |= {"dim": part.dim, "num_heads": part.num_heads, "bases": part.base_names()}
            described[name]["blocks"] = [entry.short() for entry in part.blocks]
    return described


def save_adapted(model: nn.Module, folder: str | Path) -> None:
    """Saves an adapted model in a folder, from which :func:`load_adapted` makes it again.

    The folder has the files of the original model, without the similarities: those of its ``save_pretrained``, if it
    has one, as models of transformers and of ``PyTorchModelHubMixin`` do, else ``model.safetensors``. Libraries that do
    not know this package load it as the original model. Two files are added: ``similarities.safetensors``, as
    :func:`save_similarities` writes it, and ``adapted.json``, which says how each module was adapted.

    Args:
        model: a model after :func:`adapt_`, or one that was built with adaptive layers.
        folder: the folder to write to, which is created if it does not exist.

    Raises:
        AHopError: ``model`` has no similarity, or safetensors is not installed.

    >>> import tempfile, ahop_layers as ah
    >>> def build():
    ...     return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> model, x = build(), torch.randn(1, 5, 16)
    >>> report = ah.adapt_(model, blocks=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ah.save_adapted(model, folder)
    ...     loaded = ah.load_adapted(folder, build)
    >>> loaded.self_attn.similarity
    AdaptiveSimilarity(8, num_heads=2, bases=('dis', 'dot'), init='dot', debias=False, blocks=4)
    >>> torch.equal(loaded(x), model(x))
    True
    """
    parts, adapted, folder = similarity_parts(model), outermost(adapted_modules(model)), files.as_path(folder)
    modules = {name: _how_adapted(module) for name, module in adapted.items()}
    added = {part for module in adapted.values() for part in module.modules()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AHopError(f"folder must be one that can be written, got {str(folder)!r}: {error}") from error
    save_similarities(model, folder / SIMILARITIES)
    with _without(model, [name for name, part in parts.items() if part in added]):
        save: Any = getattr(model, "save_pretrained", None)
        if save is not None:
            save(folder)
        else:
            from safetensors.torch import save_model

            with files.replacing(folder / WEIGHTS) as part:
                save_model(model, str(part))
    with files.replacing(folder / ADAPTED) as part:
        part.write_text(json.dumps({"version": VERSION, "modules": modules}, indent=2) + "\n")


def load_adapted(
    folder: str | Path, cls: Callable[..., nn.Module], *, similarity: SimilaritySource | None = None, **keywords: Any
) -> nn.Module:
    """Loads a model that :func:`save_adapted` saved.

    Args:
        folder: the folder. For a repository of the hub, that is the result of ``huggingface_hub.snapshot_download``.
        cls: a class with ``from_pretrained``, such as ``AutoModelForImageClassification``; else a class or function
            that builds the original model, such as ``lambda: timm.create_model("vit_tiny_patch16_224")``.
        similarity: for modules that were adapted with a similarity of your own, that module or factory, as for
            :func:`adapt_`.
        keywords: further arguments of ``cls.from_pretrained``, or of ``cls``.

    Raises:
        AHopError: the folder has no adapted model, or the model that ``cls`` builds does not fit it.

    >>> import tempfile, ahop_layers as ah
    >>> model = nn.MultiheadAttention(8, 2)
    >>> report = ah.adapt_(model, blocks=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ah.save_adapted(model, folder)
    ...     ah.load_adapted(folder, nn.MultiheadAttention, embed_dim=8, num_heads=2).similarity
    AdaptiveSimilarity(4, num_heads=2, bases=('dis', 'dot'), init='dot', debias=False, blocks=2)
    """
    modules = _read(files.as_path(folder))
    build = getattr(cls, "from_pretrained", None)
    model = cls(**keywords) if build is None else build(folder, **keywords)
    if build is None:
        import safetensors
        from safetensors.torch import load_model

        path = str(Path(folder) / WEIGHTS)
        try:
            load_model(model, path)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            raise AHopError(f"{path!r} must be the weights of the model, got another file: {error}") from error
    copies, parts = find_copies(model), dict(model.named_modules())
    dtype_source = next((p for p in model.parameters() if p.is_floating_point()), None)
    for name, entry in modules.items():
        with naming(name):
            module = parts.get(name)
            sites: Any = None if entry["sites"] is None else (*entry["sites"], dtype_source)
            found = None if module is None else copies.get(module) or converter_for(module)
            converter = found if sites is None else call_converter(*sites)
            if module is None or full_name(type(module)) != entry["class"] or not isinstance(converter, Converter):
                got = "no such module" if module is None else full_name(type(module))
                raise AHopError(f"the model must have the module that was saved, {entry['class']}, got {got}")
            converter.convert(module, _options(entry, similarity).copied())
    load_similarities(model, Path(folder) / SIMILARITIES)
    exempt_from_decay(model)
    return model


def _read(folder: Path) -> dict[str, Any]:
    """Returns how each module was adapted, as :func:`_how_adapted` says it."""
    rule = f"folder must be one that save_adapted wrote, version {VERSION}"
    try:
        saved = files.as_header((folder / ADAPTED).read_bytes())
    except (OSError, ValueError) as error:
        raise AHopError(f"{rule}, got no {ADAPTED} that can be read in {str(folder)!r}: {error}") from error
    if saved.get("version") != VERSION:
        raise AHopError(f"{rule}, got version {saved.get('version')} in {str(folder)!r}")
    modules: Any = saved.get("modules")
    keys = {"class", "sites", "separation", "similarity"}
    entries = modules.values() if isinstance(modules, dict) else [None]
    if not all(isinstance(entry, dict) and entry.keys() >= keys for entry in entries):
        raise AHopError(f"{rule}, got an {ADAPTED} without modules in {str(folder)!r}")
    return dict(modules)


def _how_adapted(module: Any) -> dict[str, Any]:
    """Returns how a module was adapted, as values of JSON."""
    first = next(iter(named_similarities(module).values()), None)
    separation: Any = next(part.separation for part in module.modules() if isinstance(part, Associator))
    if type(separation) is not Separation:
        raise AHopError(f"save_adapted needs a separation of this package, got {type(separation).__name__}")
    alpha, sites = separation.alpha_logit, getattr(module, "_ahop_sites", None)
    described: dict[str, Any] = {
        "class": full_name(module._ahop_original.source),
        "sites": None if sites is None else [sites, module._ahop_products],
        "separation": [separation.name, None if alpha is None or alpha.ndim == 0 else len(alpha)],
        "similarity": None,
    }
    if type(first) is AdaptiveSimilarity:
        blocks = [
            [entry.assignment if entry.named is None else entry.named.tolist(), entry.normalize]
            for entry in first.blocks
        ]
        init = first.init if isinstance(first.init, str) else "uniform"
        options = {"bases": first.bases, "init": init, "debias": first.bias is not None, "blocks": blocks}
        described["similarity"] = options
    return described


def _options(entry: dict[str, Any], similarity: SimilaritySource | None) -> SimilarityOptions:
    """Returns the options of :func:`_how_adapted`; ``similarity`` is the one of the user, if the module had one."""
    separation, given = Separation(*entry["separation"]), entry["similarity"]
    if given is None:
        if similarity is None:
            raise AHopError("similarity must be given for a module with a similarity of your own, got None")
        return SimilarityOptions(separation=separation, similarity=similarity)
    bases = [base if isinstance(base, str) else tuple(base) for base in given["bases"]]
    pairs = ((torch.tensor(each) if isinstance(each, list) else each, rule) for each, rule in given["blocks"])
    blocks = [Blocks(each, normalize) for each, normalize in pairs]
    options: Any = {**given, "bases": bases, "blocks": blocks}
    return SimilarityOptions(separation=separation, **options)


def _without(model: nn.Module, names: list[str]) -> Any:
    """Leaves parts of a model out of its state dicts, until the context that it returns ends."""

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        starts = tuple(f"{prefix}{name}." if name else prefix for name in names)
        for key in [key for key in state if key.startswith(starts)]:
            del state[key]

    register: Any = model.register_state_dict_post_hook
    return register(drop)
