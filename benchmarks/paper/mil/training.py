"""Bag classifiers: data, folds, training, and the selection of hyperparameters."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, binary_cross_entropy_with_logits

from ahop_layers.memory.variants import Mixed, Noisy, Variant
from ahop_layers.training import parameter_groups
from benchmarks.bag_sets import BagSet
from benchmarks.bags import auc
from benchmarks.paper.bag_classifier import BagClassifier, GatedPool, HopfieldPool
from benchmarks.paper.kernel_similarity import KernelSimilarity, separation_loss
from benchmarks.paper.similarities import Constant, DotProduct
from benchmarks.paper.training import folded_weights

INNER_FOLDS = 3
VARIANTS: dict[str, Variant] = {
    **{f"mask {share}": Mixed(share) for share in (0.25, 0.5, 0.75)},
    **{f"noise {deviation}": Noisy(deviation**2) for deviation in (0.5, 1.0, 2.0)},
    **{f"bias {size}": Mixed(bias=size) for size in (0.5, 1.0, 2.0)},
}
POOLINGS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "dot": {"similarity": DotProduct},
    "sparse": {"similarity": DotProduct, "separation": "sparsemax"},
    "kernel": {"similarity": KernelSimilarity, "separation": "entmax15"},
    "uniform": {"similarity": Constant},
}
"""Options of the Hopfield poolings: A-Hop, M-Hop, S-Hop, K-Hop, and equal weights, a baseline without scores."""


@dataclass(frozen=True)
class Setting:
    """Hyperparameters of a training.

    Attributes:
        clip: bound of the standardized features.
        lr: learning rate, which decays by 0.94 per epoch.
        decay: weight decay.
        dropout: probability of dropping the weight of an instance.
        scaling: factor of the Hopfield scores.
        batch: bags per step.
        epochs: upper bound on the epochs.
    """

    clip: float
    lr: float
    decay: float = 0.5
    dropout: float = 0.75
    scaling: float = 1.0
    batch: int = 32
    epochs: int = 14


def settings(data: str) -> list[Setting]:
    """Returns the settings that every model chooses from; the first is that of a training without a search."""
    known = {"decay": 0.01, "scaling": 0.1, "batch": 16, "epochs": 20} if data == "ucsb" else {}
    return [Setting(clip, lr, **known) for clip, lr in product((2.0, 4.0), (1e-3, 3e-3))]


class StandardizedBags:
    """Bags in memory, with standardized and clipped features.

    Args:
        data: all bags.
        train: bags that determine mean and standard deviation; features that are constant in them are left out.
        clip: bound of the standardized features.
        variant: damage of every instance.
        seed: seed of the damage.
    """

    def __init__(self, data: BagSet, train: Tensor, clip: float, variant: Variant | None = None, seed: int = 0) -> None:
        bags = [data.read(number) for number in range(len(data.names))]
        known = torch.cat([bags[number] for number in train.tolist()])
        mean, deviation = known.mean(0), known.std(0)
        varies = deviation > 1e-6
        rows = ((torch.cat(bags) - mean) / deviation)[:, varies].clamp(-clip, clip)
        if variant is not None:
            rows = variant(rows, torch.Generator().manual_seed(seed)).clamp(-clip, clip)
        self.labels, self.features = data.labels, rows.shape[1]
        self.bags = rows.split([len(bag) for bag in bags])

    def packed(self, index: Tensor) -> tuple[Tensor, list[int]]:
        """Returns the instances of the chosen bags, concatenated, and the sizes of the bags."""
        chosen = [self.bags[number] for number in index.tolist()]
        return torch.cat(chosen), [len(bag) for bag in chosen]


def folds(labels: Tensor, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Returns stratified folds: for each fold, the bags outside it and inside it."""
    split = StratifiedKFold(count, shuffle=True, random_state=seed).split(labels, labels)
    return [(torch.from_numpy(outside), torch.from_numpy(inside)) for outside, inside in split]


def outer_folds(data: BagSet, count: int, repeat: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the published folds of a repeat, or random folds with ``repeat`` as seed if there are none."""
    if data.splits is None or data.splits.shape[1] != count or repeat >= len(data.splits):
        return folds(data.labels, count, repeat)
    return [(kept.nonzero().flatten(), (~kept).nonzero().flatten()) for kept in data.splits[repeat]]


def make_classifier(features: int, pooling: str, setting: Setting) -> BagClassifier:
    """Returns a classifier with a linear embedding, and gated attention or a pooling of :data:`POOLINGS`."""
    embed = nn.Sequential(nn.Linear(features, 64), nn.ReLU())
    if pooling == "gated":
        return BagClassifier(embed, GatedPool(64, 32, setting.dropout))
    options = POOLINGS[pooling]
    return BagClassifier(embed, HopfieldPool(scaling=setting.scaling, dropout=setting.dropout, **options))


def train(
    bags: StandardizedBags,
    index: Tensor,
    pooling: str,
    setting: Setting,
    seed: int,
    epochs: int,
    watch: Tensor | None = None,
) -> tuple[BagClassifier, list[float]]:
    """Trains a classifier on the bags ``index``.

    A pooling such as ``adaptive x10`` multiplies the learning rate of the similarities by ten.

    Returns:
        The classifier, and the AUC on the bags ``watch`` after each epoch.
    """
    torch.manual_seed(seed)
    name, _, multiplier = pooling.partition(" x")
    model = make_classifier(bags.features, name, setting)
    watched = []
    held = None if watch is None else (bags.labels[watch], bags.packed(watch))
    with folded_weights(model):
        # Weight decay excludes adaptive similarities, and includes the kernel of K-Hop.
        parameters = model.parameters()
        if name == "adaptive":
            parameters = parameter_groups(model, setting.lr, setting.lr * float(multiplier or 1), setting.decay)
        optimizer = torch.optim.AdamW(parameters, setting.lr, weight_decay=setting.decay, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.94)
        for _ in range(epochs):
            model.train()
            for chosen in index[torch.randperm(len(index))].split(setting.batch):
                logits, _ = model(*bags.packed(chosen))
                loss = binary_cross_entropy_with_logits(logits, bags.labels[chosen]) + separation_loss(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
            if held is not None:
                watched.append(auc(held[0], scores(model, *held[1])))
    return model.eval(), watched


@torch.no_grad()
def scores(model: BagClassifier, instances: Tensor, sizes: list[int]) -> Tensor:
    """Computes the logits ``(bags,)`` in evaluation mode."""
    return model.eval()(instances, sizes)[0]


def choose(data: BagSet, kept: Tensor, pooling: str, offered: list[Setting], seed: int) -> tuple[Setting, int]:
    """Selects the setting and the number of epochs with the best AUC on inner folds of the bags ``kept``.

    The AUC of few bags is noisy, so it is averaged over the folds and over neighboring epochs.
    """
    found: list[list[list[float]]] = []
    for number, (outside, inside) in enumerate(folds(data.labels[kept], INNER_FOLDS, seed)):
        rest, watch, own_seed = kept[outside], kept[inside], seed + 100 * (number + 1)
        runs = [(StandardizedBags(data, rest, setting.clip), setting) for setting in offered]
        found.append([train(bags, rest, pooling, each, own_seed, each.epochs, watch)[1] for bags, each in runs])
    mean = avg_pool1d(torch.tensor(found).mean(0), 3, 1, 1, count_include_pad=False)  # (settings, epochs)
    best = int(mean.argmax())
    return offered[best // mean.shape[1]], best % mean.shape[1] + 1
