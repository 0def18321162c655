"""Codes: a few bits for each value of a pattern, whose Hamming distances find a shortlist for the exact score.

A bit is a square wave of a value, with a random period and phase. Near values share most of their bits, values far
apart share half of them, however far apart they are. So the distance saturates, as robust scores do, and a wrong value
adds equal noise to all patterns. An unknown value does the same: its byte is constant, and unknown values of a query
and of a pattern differ in half of their bits.

The periods are multiples of the typical difference of a dimension, or of all dimensions. Of several scales, codes have
the finest one whose distances correlate well with the exact scores of stored patterns, so they follow a learned score.
"""

import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError
from ahop_layers.memory.storage import Stored
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.widths import differences, units

WORD = 8  # codes are padded to so many bytes, for which FAISS has faster code
OCTAVES = (-1.0, 6.0)  # scales of periods in powers of two, relative to typical differences
CORRELATION = 0.9  # share of the largest correlation that is enough: finer scales separate near patterns better
SPREAD = 2.0  # range of periods around each scale, in octaves
COMPARED = (64, 1024)  # number of patterns that are compared with others to choose a scale, and of others
ENCODED_ELEMENTS = 2**18  # number of values that are encoded at once, which stay in the cache
UNKNOWN_PATTERN, UNKNOWN_QUERY = 0x0F, 0x00  # bytes of unknown values, which differ in half of their bits
SEED = 0x2545F491


class Codes(NamedTuple):
    """Codes of patterns.

    Attributes:
        rate: number of periods per unit of each value ``(bits, d)``.
        phase: share of a period by which each wave is shifted ``(bits, d)``.
        packed: the codes of the patterns, uint8 ``(n, bytes)``.
    """

    rate: Tensor
    phase: Tensor
    packed: Tensor

    def encode(self, rows: Tensor, unknown: int = UNKNOWN_PATTERN) -> Tensor:
        """Returns the codes ``(n, bytes)`` of ``rows (n, d)``, with the byte ``unknown`` for each NaN."""
        bits, dim = self.rate.shape
        size = dim * bits // 8
        packed = torch.zeros(len(rows), -(-size // WORD) * WORD, dtype=torch.uint8)
        chunks = (torch.split(each, max(1, ENCODED_ELEMENTS // dim)) for each in (rows, packed))
        for some, code in zip(*chunks, strict=True):
            values = some.to(self.rate.dtype)
            missing = values.isnan()
            for place in range(bits // 8):
                byte = code[:, place * dim : (place + 1) * dim]
                for bit in range(8 * place, 8 * place + 8):
                    byte.mul_(2).add_(self.wave(values, bit))
                byte.masked_fill_(missing, unknown)
        return packed

    def added(self, rows: Tensor, place: Tensor, count: int) -> "Codes":
        """Returns the codes of ``count`` patterns, of which ``rows (n, d)`` are new, at the indices ``place (n,)``."""
        packed = functional.pad(self.packed, (0, 0, 0, count - len(self.packed)))
        packed[place] = self.encode(rows)
        return self._replace(packed=packed)

    def wave(self, rows: Tensor, bit: int) -> Tensor:
        """Returns one bit of each value of ``rows (n, d)``: bool ``(n, d)``."""
        turns = torch.addcmul(self.phase[bit], rows, self.rate[bit])
        return turns.sub_(turns.floor()) < 0.5

    def nearest(self, rows: Tensor, count: int) -> Tensor:
        """Returns the patterns with the smallest distances from each of ``rows (L, d)``, nearest first: ``(L, count)``.

        FAISS divides queries among threads. If there are too few, the patterns are divided instead.
        """
        library, threads = faiss(), torch.get_num_threads()
        query = self.encode(rows, UNKNOWN_QUERY).numpy()
        parts = self.packed.tensor_split(threads if len(rows) < threads and count * threads < len(self.packed) else 1)
        with ThreadPoolExecutor(len(parts)) as pool:
            found = list(pool.map(lambda part: library.knn_hamming(query, part.numpy(), count), parts))
        starts = itertools.accumulate(map(len, parts[:-1]), initial=0)
        distance = torch.cat([torch.from_numpy(each) for each, _ in found], 1)
        index = torch.cat([torch.from_numpy(each) + start for (_, each), start in zip(found, starts, strict=True)], 1)
        return index if len(parts) == 1 else index.gather(1, distance.sort(dim=1, stable=True).indices[:, :count])


def faiss() -> Any:
    """Returns the library that scans codes, or raises."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise AHopError("a shortlist needs FAISS, got no installation: pip install ahop-layers[search]") from error


@torch.no_grad()
def make_codes(stored: Stored, score: Callable[[Tensor, Tensor], Tensor], bits: int) -> Codes:
    """Makes codes of the patterns of this rank, of ``bits`` bits for each value.

    ``score`` compares stored patterns: ``(l, d), (n, d) -> (l, n)``. All ranks must make codes together.
    """
    faiss()  # raises before anything takes time
    wide, generator = accumulation_dtype(stored.dtype), torch.Generator().manual_seed(SEED)
    exponent, phase = torch.rand(2, bits, stored.dim, generator=generator, dtype=torch.float64).to(wide)
    n = len(stored.patterns)
    sample = stored.sample(torch.arange(0, n, max(1, n // sum(COMPARED))))
    query, others = sample[-COMPARED[0] :], sample[: COMPARED[1]]
    exact, query, others = score(query, others).to(wide), query.to(wide), others.to(wide)
    exact = exact.clamp(min=exact[exact > -torch.inf].min())  # -inf without a common value
    own, tried = units(differences(sample)), []
    for octave in torch.arange(*OCTAVES).tolist():
        for unit in (own, own.median().expand_as(own)):
            codes = Codes((unit * 2 ** (octave + SPREAD * (exponent - 0.5))).reciprocal(), phase, sample)
            near = torch.zeros_like(exact)
            for bit in range(bits):
                first, second = (codes.wave(each, bit).to(wide) - 0.5 for each in (query, others))
                near += first @ second.mT
            wanted, found = (each - each.mean(1, keepdim=True) for each in (exact, near))
            tried.append((functional.cosine_similarity(wanted, found).mean().item(), codes))
    enough = CORRELATION * max(correlation for correlation, _ in tried)
    codes = next(codes for correlation, codes in tried if correlation >= enough)
    rate = codes.rate if stored.shards is None else stored.shards.gather(codes.rate)[0]
    codes = codes._replace(rate=rate)
    return codes._replace(packed=codes.encode(stored.patterns))
