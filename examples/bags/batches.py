"""Packed batches of bags, read from disk when they are needed: the data module of examples/mil.py."""

from collections.abc import Sequence

import lightning as L
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader

from ahop_layers import AHopError
from benchmarks.bag_sets import BagSet

Batch = tuple[Tensor, list[int], Tensor]  # instances (total, features), sizes of the bags, labels (bags,)


class BagData(L.LightningDataModule):
    """Training, validation and test bags of a data set.

    A fifth of the bags is the test set, unless the data set defines one. A fifth of the others is the validation set.
    """

    def __init__(self, data: BagSet, batch_size: int, seed: int, workers: int = 0) -> None:
        super().__init__()
        self.data, self.batch_size, self.seed, self.workers = data, batch_size, seed, workers
        rest, test = list(range(len(data.labels))), data.test
        for label in (0, 1):
            if (found := int((data.labels == label).sum())) < 5:
                raise AHopError(f"expected at least 5 bags of label {label}, got {found}")
        if test is None:
            rest, test = train_test_split(rest, test_size=0.2, random_state=seed, stratify=data.labels)
        rest = sorted(set(rest) - set(test))
        split = train_test_split(rest, test_size=0.2, random_state=seed, stratify=data.labels[rest])
        self.train, self.held, self.test = split[0], split[1], list(test)

    def gather(self, index: Sequence[int]) -> Batch:
        """Reads bags by their indices."""
        bags = [self.data.read(number) for number in index]
        return torch.cat(bags), [len(bag) for bag in bags], self.data.labels[list(index)]

    def batches(self, index: Sequence[int]) -> DataLoader:
        """Returns a loader of the bags of ``index`` in this order."""
        # Without its own generator, the loader would draw from the global one, on which dropout depends.
        own = torch.Generator()
        return DataLoader(index, self.batch_size, collate_fn=self.gather, num_workers=self.workers, generator=own)

    def train_dataloader(self) -> DataLoader:
        """Returns the training bags. Seed and epoch determine their order, so that a resumed run repeats it."""
        generator = torch.Generator().manual_seed(self.seed + self.trainer.current_epoch)
        order = torch.randperm(len(self.train), generator=generator)
        return self.batches([self.train[place] for place in order.tolist()])

    def val_dataloader(self) -> DataLoader:
        """Returns the validation bags."""
        return self.batches(self.held)

    def test_dataloader(self) -> DataLoader:
        """Returns the test bags."""
        return self.batches(self.test)
