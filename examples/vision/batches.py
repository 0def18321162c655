"""Batches of bytes in the memory of the training device: the data module of examples/vit.py.

There is no data loader: the training images stay on the device, and a batch is augmented there in one operation.
"""

from collections.abc import Callable, Iterator

import lightning as L
import torch
from torch import Tensor

from ahop_layers import AHopError
from benchmarks.image_sets import Images, ImageSet


def as_floats(images: Tensor) -> Tensor:
    """Converts bytes to floats from 0 to 1."""
    return images.float() / 255


def channel_scale(images: Tensor) -> dict[str, tuple[float, ...]]:
    """Returns mean and standard deviation of each channel of ``images (n, channels, height, width)``."""
    numbers = as_floats(images)
    return {"mean": tuple(numbers.mean((0, 2, 3)).tolist()), "std": tuple(numbers.std((0, 2, 3)).tolist())}


def augment(images: Tensor, mirror: bool, generator: torch.Generator | None = None) -> Tensor:
    """Shifts each image by up to 1/8 of its height, with black padding, and flips half of them if ``mirror``."""
    n, channels, height, width = images.shape
    reach = height // 8
    padded = torch.nn.functional.pad(images, (reach,) * 4)

    def draw(values: int) -> Tensor:
        return torch.randint(values, (n, 1), generator=generator, device=images.device)

    rows = draw(2 * reach + 1) + torch.arange(height, device=images.device)
    columns = draw(2 * reach + 1) + torch.arange(width, device=images.device)
    if mirror:
        columns = torch.where(draw(2).bool(), columns.flip(-1), columns)
    image = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


class InOrder(list[tuple[Tensor, Tensor]]):
    """Batches of all images in their order. To Lightning a plain list would be several loaders."""

    def __init__(self, data: Images, size: int = 256) -> None:
        super().__init__(zip(data.images.split(size), data.labels.split(size), strict=True))


class Batches:
    """The training batches of an epoch, independent of the number of processes.

    Seed and step determine the order of the images and their augmentation. So processes share a batch without
    communication, and a resumed run continues with the batch at which it was interrupted.
    """

    def __init__(
        self,
        data: Images,
        size: int,  # over all processes; the last, incomplete batch of an epoch is dropped
        seed: int,
        steps_done: Callable[[], int],  # returns the number of training steps so far, over all epochs
        rank: int = 0,
        world: int = 1,  # number of processes
        mirror: bool | None = None,  # whether to flip images; None for no augmentation
    ) -> None:
        if size % world:
            raise AHopError(f"expected a batch size that is a multiple of the {world} processes, got {size}")
        self.data, self.size, self.seed, self.steps_done = data, min(size, len(data.labels)), seed, steps_done
        self.rank, self.world, self.mirror = rank, world, mirror

    def __len__(self) -> int:
        return len(self.data.labels) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, done = divmod(self.steps_done(), len(self))
        device, generator = self.data.images.device, torch.Generator().manual_seed(self.seed)
        for _ in range(epoch + 1):
            order = torch.randperm(len(self.data.labels), generator=generator)
        order = order.to(device)
        for number in range(done, len(self)):
            index = order[number * self.size : (number + 1) * self.size][self.rank :: self.world]
            images = self.data.images[index]
            if self.mirror is not None:
                step = (epoch * len(self) + number) * self.world + self.rank
                images = augment(images, self.mirror, torch.Generator(device).manual_seed(self.seed + step))
            yield images, self.data.labels[index]

    def state_dict(self) -> dict[str, int]:
        """Returns nothing: the step counter of the trainer is the only state."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Does nothing; by this method Lightning knows that an epoch can be resumed."""


class ImageBatches(L.LightningDataModule):
    """Training, validation (a tenth of the training images) and test batches of a data set.

    Every process evaluates all validation and test images: they are few.
    """

    def __init__(self, data: ImageSet, batch_size: int, seed: int, augment: bool) -> None:
        super().__init__()
        if len(data.train.labels) < 2 or not len(data.test.labels):
            counts = f"{len(data.train.labels)} and {len(data.test.labels)}"
            raise AHopError(f"expected at least 2 training images and 1 test image, got {counts}")
        order = torch.randperm(len(data.train.labels), generator=torch.Generator().manual_seed(seed))
        held, kept = order[: len(order) // 10 or 1], order[len(order) // 10 or 1 :]
        self.train, self.held = (Images(data.train.images[part], data.train.labels[part]) for part in (kept, held))
        self.data, self.batch_size, self.seed, self.augment = data, batch_size, seed, augment

    def train_dataloader(self) -> Batches:
        """Returns the training batches, which all processes share."""
        trainer, mirror = self.trainer, self.data.mirror if self.augment else None
        train, share = self.train.to(trainer.strategy.root_device), (trainer.global_rank, trainer.world_size)
        return Batches(train, self.batch_size, self.seed, lambda: trainer.global_step, *share, mirror)

    def val_dataloader(self) -> InOrder:
        """Returns the validation images."""
        return InOrder(self.held)

    def test_dataloader(self) -> InOrder:
        """Returns the test images."""
        return InOrder(self.data.test)
