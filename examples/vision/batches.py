"""Batches cut out of a data set in memory, on the device that trains: the batches of examples/vit.py.

Training never waits for a data loader: images lie as bytes in the memory of the device and are augmented there, a whole
batch at once.
"""

from collections.abc import Callable, Iterator

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers import AHopError
from examples.vision.data import Images, ImageSet


def as_floats(images: Tensor) -> Tensor:
    """Bytes to numbers from 0 to 1."""
    return images.float() / 255


def channel_scale(images: Tensor) -> dict[str, tuple[float, ...]]:
    """Mean and standard deviation of each channel of ``images (n, channels, height, width)``, as a model takes them."""
    numbers = as_floats(images)
    return {"mean": tuple(numbers.mean((0, 2, 3)).tolist()), "std": tuple(numbers.std((0, 2, 3)).tolist())}


def augment(images: Tensor, mirror: bool, generator: torch.Generator | None = None) -> Tensor:
    """Shift each image by up to an eighth of its side, what comes in being black, and mirror every second one."""
    n, channels, height, width = images.shape
    reach = height // 8
    padded = functional.pad(images, (reach,) * 4)

    def draw(values: int) -> Tensor:
        return torch.randint(values, (n, 1), generator=generator, device=images.device)

    rows = draw(2 * reach + 1) + torch.arange(height, device=images.device)
    columns = draw(2 * reach + 1) + torch.arange(width, device=images.device)
    if mirror:
        columns = torch.where(draw(2).bool(), columns.flip(-1), columns)
    image = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


class Batches:
    """The batches of an epoch, the same for any number of processes, and from any step on.

    Everything random follows from the seed and the number of the step. So processes share each batch without talking to
    each other, and a run that was interrupted in the middle of an epoch goes on with the batch it had come to.

    Args:
        data: where the batches are cut out.
        size: of a batch, all processes together; images that fill no batch are left for another epoch.
        seed: of the order and of the augmentation.
        steps_done: says how many batches have been trained on since the first epoch began.
        rank, world: the number of this process, and how many there are.
        mirror: None for no augmentation; see :func:`augment`.
    """

    def __init__(
        self,
        data: Images,
        size: int,
        seed: int,
        steps_done: Callable[[], int],
        rank: int = 0,
        world: int = 1,
        mirror: bool | None = None,
    ) -> None:
        if size % world:
            raise AHopError(f"expected a batch size that {world} processes can share, got {size}")
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
            yield as_floats(images), self.data.labels[index]

    def state_dict(self) -> dict[str, int]:
        """Nothing: the trainer's own count of steps is all there is to remember."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing, likewise; that the method exists tells Lightning that an epoch can be resumed in its middle."""


class InOrder:
    """All images of a part, batch by batch, as they are."""

    def __init__(self, data: Images, size: int = 256) -> None:
        self.parts = list(zip(*(rows.split(size) for rows in data), strict=True))

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((as_floats(images), labels) for images, labels in self.parts)


class ImageBatches(L.LightningDataModule):
    """Training, validation (a tenth of the training images) and test batches of a data set.

    Validation and test images are the same for every process: sharing them would cost more than it saves.
    """

    def __init__(self, data: ImageSet, batch_size: int, seed: int, augment: bool) -> None:
        super().__init__()
        order = torch.randperm(len(data.train.labels), generator=torch.Generator().manual_seed(seed))
        held, kept = order[: len(order) // 10 or 1], order[len(order) // 10 or 1 :]
        self.train, self.held = (Images(data.train.images[part], data.train.labels[part]) for part in (kept, held))
        self.data, self.batch_size, self.seed, self.augment = data, batch_size, seed, augment

    def train_dataloader(self) -> Batches:
        """Shared by all processes."""
        trainer, mirror = self.trainer, self.data.mirror if self.augment else None
        train, share = self.train.to(trainer.strategy.root_device), (trainer.global_rank, trainer.world_size)
        return Batches(train, self.batch_size, self.seed, lambda: trainer.global_step, *share, mirror)

    def val_dataloader(self) -> InOrder:
        """Images held out of training."""
        return InOrder(self.held)

    def test_dataloader(self) -> InOrder:
        """Images that nothing was chosen by."""
        return InOrder(self.data.test)
