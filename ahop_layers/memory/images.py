"""ImageSimilarity: compares images by their pixels, contrasts and overlapping patches, and ignores what is covered."""

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_sizes, describe
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BaseArgument
from ahop_layers.similarity.blocks import Blocks
from ahop_layers.similarity.protocol import Similarity

PIXELS: tuple[BaseArgument, ...] = ("l1", ("near", 0.02), ("near", 0.1), ("near", 0.5))
CONTRASTS: tuple[BaseArgument, ...] = (("near", 0.05), ("near", 0.2))
OFFSETS = ((0, 1), (1, 0), (1, 1), (1, -1))  # distances in rows and columns of the two pixels of a contrast
DARK = 0.05  # brightness below which a contrast counts little, relative to the root mean square of stored pixels
BEST_SHARE = 0.5  # share of the patches, the best ones, that count before the weights are learned
PIXEL_START = 60.0  # weight of the narrowest saturating similarity of pixels before that, for an image of one pixel
CHANCE_SHARE = 0.05  # share of the pixels, the best ones, that do not count: so many agree by chance
CONTRAST_START = 1.5  # weight of the widest saturating similarity of contrasts, relative to the patches


class ImageSimilarity(nn.Module, Similarity):
    """Scores how well two images agree, although a part of one of them is covered, wrong or unknown.

    The score is the sum of adaptive similarities of several views of the images. Each of them sorts what it compares
    and learns how much each rank counts, so that it can ignore what does not agree:

    - ``pixels``: the differences of pixels, and saturating similarities of several widths.
    - ``contrasts``: the difference of two neighboring pixels, divided by their sum. The brightness does not matter.
    - ``patches``: the correlations of overlapping square patches, one similarity for each size. Neither the brightness
      nor the contrast of a patch matters.

    Before any training, the score is the mean correlation of the best half of the patches, plus the shares of pixels
    that agree closely, beyond chance, and of contrasts that agree roughly, times constants: pixels find images with
    wrong pixels, and contrasts and patches find images of another lighting. Patches of larger images say more, so the
    constant of the pixels is divided by the mean side. The settings were chosen on six sets of faces and digits.

    Args:
        height, width: size of the images in pixels.
        channels: number of channels. An image is a row of ``channels * height * width`` values, channels first.
        sizes: sides of the patches. Patches are half their side apart. Sizes of which an image has only one patch are
            left out.
        shifts: compare the query shifted by up to so many pixels in each direction, and take the best score. It costs
            ``(2 * shifts + 1) ** 2`` times as much.

    Raises:
        AHopError: a size is invalid.

    >>> image = torch.rand(5, 16 * 16)
    >>> query = image[:1].clone()
    >>> query[:, :128] = torch.rand(128)  # the upper half
    >>> ImageSimilarity(16, 16)(query, image).argmax()
    tensor(0)
    """

    allows_missing = is_solvable = True
    _ranges: ClassVar[dict[str, str]] = {"dark": "a number of at least 0"}
    dark: Tensor

    def __init__(
        self, height: int, width: int, channels: int = 1, sizes: Sequence[int] = (2, 4, 8), shifts: int = 0
    ) -> None:
        super().__init__()
        check_sizes(height=height, width=width, channels=channels)
        for size in sizes:
            check_sizes(size=size)
        if isinstance(shifts, bool) or not isinstance(shifts, int) or not 0 <= shifts < min(height, width):
            raise AHopError(f"shifts must be an integer from 0 to {min(height, width) - 1}, got {shifts!r}")
        self.height, self.width, self.channels, self.shifts = height, width, channels, shifts
        places = torch.arange(channels * height * width, device="cpu").view(channels, height, width)
        self.dim = places.numel()
        self.register_buffer("dark", torch.zeros(()))
        self.pixels = self._view(places.reshape(1, -1), PIXELS)
        pairs = torch.cat([_pairs(places, *offset) for offset in OFFSETS], -1)
        self.contrasts = self._view(pairs, CONTRASTS, Blocks(1)) if pairs.numel() else None
        found = {size: _patches(places, size) for size in dict.fromkeys(sizes)}
        self.sizes = tuple(size for size, index in found.items() if size > 1 and len(index) > 1)
        self.patches = nn.ModuleList()
        for size in self.sizes:
            blocks = Blocks(len(found[size]), normalize=True)
            self.patches.append(self._view(found[size].reshape(1, -1), ("dot",), blocks))
        self.reset_parameters()

    def _view(self, index: Tensor, bases: Sequence[BaseArgument], blocks: Blocks | None = None) -> AdaptiveSimilarity:
        """Returns the similarity of a view whose values depend on the pixels ``index (pixels of a value, values)``."""
        self.register_buffer(f"_index_{len(self._buffers)}", index, persistent=False)
        return AdaptiveSimilarity(index.shape[1], bases=bases, init="uniform", blocks=blocks)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets the weights to those before any training; widths and norms stay, because they come from the images."""
        for part in self.parts():
            part.w.zero_()
            part.beta.fill_(1.0)
        self.pixels.w[1, -1] = PIXEL_START / (self.dim * (self.height * self.width) ** 0.5)
        if self.dim > 1:
            self.pixels.w[1, max(1, round(CHANCE_SHARE * self.dim)) - 1] = -self.pixels.w[1, -1]
        if self.contrasts is not None:
            self.contrasts.w[-1, -1] = CONTRAST_START / self.contrasts.dim
        for part in self.parts()[-len(self.sizes) :] if self.sizes else ():
            best = max(1, round(BEST_SHARE * part.w.shape[-1]))
            part.w[0, best - 1] = 1 / (best * len(self.patches))

    @torch.no_grad()
    def set_ranks_(self, weights: Sequence[Tensor]) -> None:
        """Sets the weights of sorted similarities, which are not cumulated: ``(n_bases, n)`` for each view."""
        for part, folded in zip(self.parts(), weights, strict=True):
            part.set_ranks_([folded])

    @torch.no_grad()
    def overview(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (L, d)`` against ``key (S, d)`` by the mean correlation of patches, one matrix product."""
        if not self.sizes:
            return query @ key.mT
        place = len(self.sizes) // 2 - len(self.sizes)
        first, second = (self._seen(rows, self._indices()[place]) for rows in (query, key))
        first, second, _ = self.parts()[place].compared(first, second)
        return first @ second.mT

    def parts(self) -> list[AdaptiveSimilarity]:
        """Returns the similarity of each view."""
        parts: list[Any] = [self.pixels, self.contrasts, *self.patches]
        return [part for part in parts if part is not None]

    def _indices(self) -> list[Tensor]:
        return [buffer for name, buffer in self.named_buffers(recurse=False) if name.startswith("_index_")]

    def views(self, rows: Tensor) -> list[Tensor]:
        """Returns what each of the :meth:`parts` compares of the images ``rows (..., d)``.

        >>> [tuple(view.shape) for view in ImageSimilarity(8, 8).views(torch.rand(5, 64))]
        [(5, 64), (5, 210), (5, 196), (5, 144)]
        """
        if rows.shape[-1] != self.dim:
            expected = f"{self.channels} * {self.height} * {self.width} = {self.dim}"
            raise AHopError(f"images must have {expected} values, got {describe(rows)}")
        return [self._seen(rows, index) for index in self._indices()]

    def prepare(self, key: Tensor) -> list[Tensor]:
        """Returns the :meth:`views` of keys, so that those of keys that stay are computed once."""
        return self.views(key)

    def _seen(self, rows: Tensor, index: Tensor) -> Tensor:
        if len(index) == 1:
            return rows if index.shape[1] == self.dim else rows.index_select(-1, index[0])
        first, second = (rows.index_select(-1, each) for each in index)
        total = first.abs() + second.abs() + 2 * self.dark.to(rows.dtype)
        return (second - first) / torch.where(total > 0, total, 1.0)

    @torch.no_grad()
    def explain(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each pixel adds to the score of ``query (L, d)`` and ``key (L, d)``: ``(L, d)``.

        What a contrast adds is divided equally between its two pixels.
        """
        shifted, source = query, None
        if self.shifts:
            missing = bool((query.isnan() | key.isnan()).any())
            shifted, source = self._aligned(query[:, None], key[:, None], missing)
        total = torch.zeros_like(query)
        views = zip(self.parts(), self._indices(), self.views(shifted), self.views(key), strict=True)
        for part, index, own, other in views:
            for places in index:
                total = total.index_add(-1, places, part.explain(own, other) / len(index))
        return total if source is None else torch.zeros_like(total).scatter_add(1, source, total)

    def forward(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Computes the scores ``(..., L, S)`` of images ``query (..., L, d)`` and ``key (..., S, d)``.

        NaN is an unknown value if ``missing`` is True. A pair without a known pixel has the score -inf. ``prepared``
        are the :meth:`views` of the keys, if they are known already.
        """
        keys = self.views(key) if prepared is None else prepared
        return reduce(torch.maximum, self._score_shifts(query, keys, missing).values())

    def _aligned(self, query: Tensor, key: Tensor, missing: bool) -> tuple[Tensor, Tensor]:
        """Shifts each ``query (L, 1, d)`` as it agrees best with its ``key (L, 1, d)``.

        Returns the shifted queries ``(L, d)``, and the pixel that each of their values comes from ``(L, d)``.
        """
        scores = self._score_shifts(query, self.views(key), missing)
        places = torch.arange(self.dim, device=query.device)
        sources = torch.stack([self._shifted(places, *offset) for offset in scores])
        source = sources[torch.stack(list(scores.values())).argmax(0).flatten()]
        return query.squeeze(1).gather(-1, source), source

    def _score_shifts(self, query: Tensor, keys: Sequence[Tensor], missing: bool) -> dict[tuple[int, int], Tensor]:
        """Scores the query shifted by each offset in rows and columns."""
        size = range(-self.shifts, self.shifts + 1)
        return {each: self._score(self._shifted(query, *each), keys, missing) for each in product(size, size)}

    def _score(self, query: Tensor, keys: Sequence[Tensor], missing: bool) -> Tensor:
        views = zip(self.parts(), self.views(query), keys, strict=True)
        scores = [part(own, key, missing=missing) for part, own, key in views]
        if missing:  # a patch needs several known pixels, so that images may have no patch in common
            scores[1:] = [each.masked_fill(each == -torch.inf, 0.0) for each in scores[1:]]
        return reduce(torch.add, scores)

    def _shifted(self, rows: Tensor, down: int, right: int) -> Tensor:
        """Moves images; the pixels that enter repeat the border."""
        if not down and not right:
            return rows
        at = [torch.arange(n, device=rows.device) for n in (self.height, self.width)]
        above, left = ((place - step).clamp(0, len(place) - 1) for place, step in zip(at, (down, right), strict=True))
        images = torch.unflatten(rows, -1, (self.channels, self.height, self.width))
        return images.index_select(-2, above).index_select(-1, left).flatten(-3)

    @torch.no_grad()
    def fix_scales_(self, key: Tensor) -> "ImageSimilarity":
        """Takes over the scales of images ``key (..., S, d)``: brightness, norms of patches, widths of bases.

        Scales that are set already stay.
        """
        if not self.dark.any():
            pixels = key.to(accumulation_dtype(key.dtype))
            self.dark.copy_(DARK * pixels.square().nanmean().sqrt().nan_to_num(0.0))
        for part, view in zip(self.parts(), self.views(key), strict=True):
            part.fix_scales_(view)
        return self

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        text = f"{self.height}, {self.width}, channels={self.channels}, sizes={self.sizes}"
        return text + (f", shifts={self.shifts}" if self.shifts else "")


def _pairs(places: Tensor, down: int, right: int) -> Tensor:
    """Returns the places of all two pixels of ``places (C, H, W)`` at a distance: ``(2, pairs)``."""
    height, width = (max(0, n - abs(step)) for n, step in zip(places.shape[1:], (down, right), strict=True))
    first = places[:, :height, max(0, -right) :][..., :width]
    second = places[:, down:, max(0, right) :][..., :width]
    return torch.stack([first.flatten(), second.flatten()])


def _patches(places: Tensor, size: int) -> Tensor:
    """Returns the places of the patches of ``places (C, H, W)``, half their side apart: ``(patches, C * size**2)``."""
    if size > min(places.shape[1:]):
        return places.new_empty(0, len(places) * size**2)
    step = max(1, size // 2)
    found = places.unfold(1, size, step).unfold(2, size, step)
    return found.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
