"""Parameter groups of an optimizer, and its state from a run without similarities."""

from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ahop_layers.errors import AHopError, check_module, describe
from ahop_layers.similarity.associator import similarity_parameters


def parameter_groups(
    model: nn.Module, lr: float | Tensor, similarity_lr: float | Tensor | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Splits the parameters of a model into optimizer groups: similarity parameters, and all others.

    Similarity parameters have no weight decay, because it would shrink all scores towards zero. If the model has some,
    their group is the second. The class of a model may have ``no_weight_decay()``, as in timm: the parameters that it
    names, biases and vectors are then in a last group without weight decay, as in ``timm.optim``.

    Args:
        model: any model, with or without adaptive layers.
        lr, similarity_lr: learning rates of the other and of the similarity parameters; None means ``lr``.
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


def extended_optimizer_state(state: dict[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of an optimizer of the original model, for one that has the similarities as well.

    So a run with hflayers can be resumed. The original parameters keep their state and their options; similarities
    have none yet, and the options that ``optimizer`` gives them if they are a group of their own. The state of an
    optimizer that had the similarities is returned as it is.

    Args:
        state: ``state_dict()`` of the optimizer of the original model.
        optimizer: of the same class, with the parameters of ``model`` in the same groups and order, and the
            similarities in one of them or in a further group, as from :func:`parameter_groups`.
        model: the model with adaptive layers.

    >>> import torch, ahop_layers as ah
    >>> model = ah.hopfield.Hopfield(8)  # or of hflayers
    >>> saved = torch.optim.AdamW(model.parameters(), lr=1e-3).state_dict()
    >>> report = ah.adapt_(model)
    >>> optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-3))
    >>> optimizer.load_state_dict(extended_optimizer_state(saved, optimizer, model))
    """
    check_module(model=model)
    added = {id(parameter) for parameter in similarity_parameters(model)}
    fresh, parameters = optimizer.state_dict(), [each for group in optimizer.param_groups for each in group["params"]]
    if sum(len(group["params"]) for group in state["param_groups"]) == len(parameters):
        return state
    kept = [[at for at in group["params"] if id(parameters[at]) not in added] for group in fresh["param_groups"]]
    before = [group["params"] for group in state["param_groups"]]
    if list(map(len, before)) != list(map(len, filter(None, kept))):
        got = f"{list(map(len, before))}, and an optimizer with {list(map(len, kept))} without similarities"
        raise AHopError(f"state must have the groups of optimizer, got groups with as many parameters as {got}")
    place = dict(zip(chain(*before), chain(*kept), strict=True))
    moved = {place[old]: values for old, values in state["state"].items()}
    for at, values in moved.items():
        for name in ("exp_avg", "momentum_buffer", "square_avg"):
            if name in values and values[name] is not None and values[name].shape != parameters[at].shape:
                rule = f"{name} of parameter {at} must be {describe(parameters[at])}"
                raise AHopError(f"{rule}, got {describe(values[name])}: is the order of the parameters another one?")
    options = iter(state["param_groups"])
    groups = [
        {
            **(next(options) if own else group),
            **{name: group[name] for name in ("params", "param_names") if name in group},
        }
        for own, group in zip(kept, fresh["param_groups"], strict=True)
    ]
    return {**state, "state": moved, "param_groups": groups}
