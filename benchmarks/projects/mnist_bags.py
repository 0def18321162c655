"""hopfield-layers, MNIST bags: a pooling layer after a convolutional network."""

from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import Project, supervised


class Network(nn.Module):
    """Features of images, pooled to one class."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(50 * 4 * 4, 500), nn.ReLU(),
        )  # fmt: skip
        self.pooling = layers.HopfieldPooling(input_size=500, hidden_size=32, output_size=500, num_heads=1)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(500, 1))

    def forward(self, bag: Tensor) -> Tensor:
        """Returns the logit of a bag ``(1, instances, 1, 28, 28)``."""
        return self.classifier(self.pooling(self.features(bag.squeeze(0)).unsqueeze(0))).flatten()


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws a bag of 10 images; one of class 1 contains an image with a bright square."""
    bag, label = 0.3 * torch.rand(1, 10, 1, 28, 28, generator=generator), torch.randint(2, (1,), generator=generator)
    bag[0, 0, 0, 8:16, 8:16] += label
    return bag, label.float()


@lru_cache(maxsize=None)
def digits() -> tuple[Tensor, Tensor]:
    """Returns the 1,797 handwritten digits of scikit-learn, resized to ``(n, 1, 28, 28)``, and their classes."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    square = images.float().reshape(-1, 1, 8, 8) / 16
    return functional.interpolate(square, size=28, mode="bilinear"), labels


def digit_bag(generator: Generator, held_out: bool) -> tuple[Tensor, Tensor]:
    """Draws a bag of 10 digits; one of class 1 contains a nine. Every fourth digit is held out."""
    images, labels = digits()
    mine = (torch.arange(len(labels)) % 4 == 0) == held_out
    label = torch.randint(2, (1,), generator=generator)
    others, nines = (torch.where(mine & same)[0] for same in (labels != 9, labels == 9))
    chosen = others[torch.randint(len(others), (10,), generator=generator)]
    if label:
        chosen[0] = nines[torch.randint(len(nines), (1,), generator=generator)]
    return images[chosen].unsqueeze(0), label.float()


loss = supervised(functional.binary_cross_entropy_with_logits)
PROJECT = Project("`HopfieldPooling` after a CNN, one bag a step", Network, batch, loss, lr=5e-4)
