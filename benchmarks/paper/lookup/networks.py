"""Networks with and without a lookup as their first layer, and their training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.memory.variants import Variant
from benchmarks.paper.lookup.layer import Lookup
from benchmarks.paper.training import folded_weights, warmup_cosine

FACE_NETWORKS = ("none", "cnn", "lookup, not trained", "lookup", "lookup and cnn")
WEIGHT_RATE = 0.03
"""Learning rate of the footprint weights and the inverse temperature of a lookup, relative to their initial size."""


class FaceClassifier(nn.Module):
    """Extracts features of faces ``(n, side * side)``, and classifies them by an MLP.

    With a lookup, the logits are the sum of its log-probabilities and the output of the MLP, which is initially zero.

    Args:
        name: one of FACE_NETWORKS: what precedes the MLP. ``"lookup, not trained"`` has no MLP.
        stored: ``(N, side * side)``, the faces of the lookup.
        labels: ``(N,)``, their persons.
        side: height and width of an image.
        kind: kind of damage. The lookup compares patches, and for damaged ``"pixels"`` also single pixels.
    """

    def __init__(self, name: str, stored: Tensor, labels: Tensor, side: int, kind: str) -> None:
        super().__init__()
        persons = nn.functional.one_hot(labels).to(stored)
        count = persons.shape[1]
        patches = [ah.Blocks(ah.patches(side, side, size), normalize=True) for size in (2, 4, 8)]
        blocks = [*([None] if kind == "pixels" else []), *patches]
        self.lookup = Lookup(stored, persons, 0.5, blocks, ("l1", "dot")) if "lookup" in name else None
        self.cnn = convolutions(side) if "cnn" in name else None
        width = count * ("lookup" in name) + 256 * ("cnn" in name) or side * side
        hidden = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, count))
        self.head = None if name == "lookup, not trained" else hidden
        if self.lookup is not None:
            nn.init.zeros_(hidden[-1].weight)
            nn.init.zeros_(hidden[-1].bias)

    def forward(self, images: Tensor, without: Tensor | None = None) -> Tensor:
        """Computes logits ``(n, persons)``; a lookup leaves out the stored image ``without (n,)`` of each image."""
        features = [] if self.cnn is None else [self.cnn(images)]
        found: Tensor | float = 0.0
        if self.lookup is not None:
            found = (self.lookup(images, without) + 1e-3).log()
            features.append(found)
        return found if self.head is None else found + self.head(torch.cat(features or [images], -1))


def convolutions(side: int) -> nn.Module:
    """Returns six convolutions that map images ``(n, side * side)`` to 256 features; ``side`` is a multiple of 8."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for before, after in ((1, 32), (32, 64), (64, 128)):
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * (side // 8) ** 2, 256), nn.ReLU())


def first_layer(name: str, stored: Tensor) -> nn.Module:
    """Returns the layer of a name of BAG_NETWORKS: it maps damaged to restored digits ``(n, 784)``."""
    if name.startswith("lookup"):
        return Lookup(stored, keep=1.0, blocks=[None, ah.patches(28, 28, 2)])
    if name in ("none", "repair"):
        return nn.Identity()
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1), nn.Flatten(),
    )  # fmt: skip


def optimize(model: nn.Module, loss: Callable[[int], Tensor], steps: int, lr: float, decay: float = 0.01) -> None:
    """Takes AdamW steps on ``loss(step)``. The learning rate rises for a tenth of the steps, then falls to zero."""
    lookups = [part for part in model.modules() if isinstance(part, Lookup)]
    model.train()
    with folded_weights(nn.ModuleList(lookups)):
        own = [parameter for part in lookups for parameter in part.parameters() if parameter.requires_grad]
        known = {id(parameter) for parameter in own}
        rest = [each for each in model.parameters() if each.requires_grad and id(each) not in known]
        groups = [{"params": [each], "lr": WEIGHT_RATE * each.abs().max().item(), "weight_decay": 0.0} for each in own]
        optimizer = torch.optim.AdamW([*groups, {"params": rest}], lr, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def train_faces(model: FaceClassifier, stored: Tensor, labels: Tensor, variant: Variant, steps: int, seed: int) -> None:
    """Trains a face classifier on damaged copies of the stored faces."""
    generator = torch.Generator(stored.device).manual_seed(seed)

    def loss(step: int) -> Tensor:
        index, images = variant.sample(stored, 128, generator)
        return nn.functional.cross_entropy(model(images, index), labels[index])

    optimize(model, loss, steps, 1e-3)
