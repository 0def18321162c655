"""The parameters of a model as an optimizer takes them."""

from torch import Tensor, nn

import ahop_layers as ah


def parameter_groups(model: nn.Module, lr: float | Tensor, similarity_lr: float = 1.0) -> list[dict[str, object]]:
    """What an optimizer takes: similarities have their own learning rate, and no decay towards an empty score."""
    scores = [part for part in model.modules() if isinstance(part, ah.AdaptiveSimilarity)]
    own = [parameter for part in scores for parameter in part.parameters()]
    known = {id(parameter) for parameter in own}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, object]] = [{"params": rest, "lr": lr}]
    return groups + [{"params": own, "lr": lr * similarity_lr, "weight_decay": 0.0}] * bool(own)
