"""Parameter groups of an optimizer."""

from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ahop_layers.errors import check_module
from ahop_layers.similarity.associator import similarity_parameters


def parameter_groups(
    model: nn.Module, lr: float | Tensor, similarity_lr: float | Tensor | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Splits the parameters of a model into optimizer groups: similarity parameters, and all others.

    Similarity parameters have no weight decay, because it would shrink all scores towards zero. If the model has some,
    their group is the second. The class of a model may have ``no_weight_decay()``, as those of timm do: the parameters
    that it names, biases and vectors are then in a last group without weight decay, as in ``timm.optim``.

    Args:
        model: any model, with or without adaptive layers.
        lr, similarity_lr: learning rate, and that of the similarity parameters; None means ``lr``.
        weight_decay: weight decay of all other parameters.

    >>> import torch, ahop_layers as ah
    >>> model = nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8))
    >>> optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-3, similarity_lr=1e-4, weight_decay=0.05))
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.001, 0.05), (0.0001, 0.0)]
    """
    check_module(model=model)
    similarity = similarity_parameters(model)
    known = {id(parameter) for parameter in similarity}
    rest = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in known}
    exempt: list[str] = []
    if weight_decay and hasattr(type(model), "no_weight_decay"):
        own: Any = model
        patterns = own.no_weight_decay()
        exempt = [
            name
            for name, parameter in rest.items()
            if parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
    decayed = [parameter for name, parameter in rest.items() if name not in exempt]
    groups: list[dict[str, Any]] = [{"params": decayed, "lr": lr, "weight_decay": weight_decay}]
    if similarity:
        groups.append({"params": similarity, "lr": lr if similarity_lr is None else similarity_lr, "weight_decay": 0.0})
    if exempt:
        groups.append({"params": [rest[name] for name in exempt], "lr": lr, "weight_decay": 0.0})
    return groups
