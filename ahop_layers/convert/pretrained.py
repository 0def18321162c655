"""save_adapted and load_adapted: an adapted model in a folder, in the format of transformers, the hub or timm."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ahop_layers import files
from ahop_layers.convert.adapt import adapted_modules, exempt_from_decay, naming
from ahop_layers.convert.copies import find_copies
from ahop_layers.convert.find import call_converter
from ahop_layers.convert.registry import Converter, converter_for, full_name
from ahop_layers.convert.saved import load_similarities, save_similarities, similarity_parts
from ahop_layers.errors import AHopError
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import (
    AdaptiveSimilarity,
    Associator,
    SimilarityOptions,
    SimilaritySource,
    named_similarities,
)
from ahop_layers.similarity.blocks import Blocks

WEIGHTS, SIMILARITIES, ADAPTED = "model.safetensors", "similarities.safetensors", "adapted.json"
VERSION = 1


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
    parts, outermost, folder = similarity_parts(model), _outermost(model), files.as_path(folder)
    modules = {name: _describe(module) for name, module in outermost.items()}
    added = {part for module in outermost.values() for part in module.modules()}
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
        _load_weights(model, Path(folder))
    copies, parts = find_copies(model, None, None), dict(model.named_modules())
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
    """Returns how each module was adapted, as :func:`_describe` says it."""
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


def _load_weights(model: nn.Module, folder: Path) -> None:
    """Loads the weights of a model without ``from_pretrained``."""
    import safetensors
    from safetensors.torch import load_model

    path = folder / WEIGHTS
    try:
        load_model(model, str(path))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise AHopError(f"{str(path)!r} must be the weights of the model, got another file: {error}") from error


def _outermost(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the adapted modules that are in no other one, by name."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in adapted_modules(model).items():
        if module not in inside:
            found[name] = module
            inside.update(module.modules())
    return found


def _describe(module: Any) -> dict[str, Any]:
    """Returns how a module was adapted, as values of JSON."""
    first = next(iter(named_similarities(module).values()), None)
    separation: Any = next(part.separation for part in module.modules() if isinstance(part, Associator))
    if type(separation) is not Separation:
        raise AHopError(f"save_adapted needs a separation of this package, got {type(separation).__name__}")
    alpha, sites = separation.alpha_logit, getattr(module, "_ahop_sites", None)
    described: dict[str, Any] = {
        "class": full_name(module._ahop_original.source),
        "sites": None if sites is None else [sites, module._ahop_products],
        "separation": [separation.name, None if alpha is None or alpha.ndim == 0 else len(alpha), separation.degree],
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
    """Returns the options of :func:`_describe`; ``similarity`` is the one of the user, if the module had one."""
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


@contextmanager
def _without(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Leaves parts of a model out of its state dicts."""

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        starts = tuple(f"{prefix}{name}." if name else prefix for name in names)
        for key in [key for key in state if key.startswith(starts)]:
            del state[key]

    register: Any = model.register_state_dict_post_hook
    handle = register(drop)
    try:
        yield
    finally:
        handle.remove()
