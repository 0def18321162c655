"""Gradients of block similarities on tensor cores: weights looked up by rank, and sums of gradients over warps."""

from collections.abc import Callable, Sequence

from ahop_layers.ops.gpu.mma import CHUNK, HALVES, MAX_BLOCKS, ROWS, Network, base_factor
from ahop_layers.ops.gpu.ptx import WARP, Program
from ahop_layers.ops.gpu.ptx_backward import WarpSums

GradOf = Callable[[int, int, list[list[str]]], str]
"""Returns the gradient of a score, given the half of the tile, the pair of the lane, and its sorted similarities."""


class RankedWeights:
    """Looks weights up by rank: a table of their low bytes and one of their high bytes, in two registers each."""

    def __init__(self, p: Program, weights: Sequence[Sequence[str]], dtype: str) -> None:
        self.p, self.n, self.tables = p, len(weights[0]), []
        for words in weights:
            factors = [*words, *["0f00000000"] * (MAX_BLOCKS - self.n)]
            pairs = [p.op(f"cvt.rn.{dtype}x2.f32", factors[i + 1], factors[i]) for i in range(0, MAX_BLOCKS, 2)]
            self.tables.append(
                [[p.op("prmt.b32", *pairs[i : i + 2], pick) for i in (0, 2)] for pick in ("0x6420", "0x7531")]
            )

    def sort(self, network: Network, values: list[str]) -> tuple[list[str], str]:
        """Returns values in descending order, and a word that holds the ranks of the blocks, four bits each."""
        p = self.p
        # The low five bits hold four times the index of the block, the distance by which its rank is shifted.
        tagged = [
            p.op("lop3.b32", value, "0xffffffe0", 4 * block, "0xea") for block, value in enumerate(values)
        ]  # (value & ~31) | tag
        ordered = network.sort(tagged, "f32")
        shifted = [p.op("shf.l.wrap.b32", 0, rank, value) for rank, value in enumerate(ordered)][1:]
        word = shifted.pop() if shifted else network.zero
        while shifted:
            second = shifted.pop()
            word = p.op("lop3.b32", word, second, shifted.pop() if shifted else 0, "0xfe")  # or
        return ordered, word

    def weights(self, index: int, ranks: str) -> list[str]:
        """Returns the weights at the ranks of the blocks, two adjacent blocks per word."""
        p, words = self.p, []
        for quad in range(-(-self.n // 4)):
            pick = p.op("shr.u32", ranks, 16) if quad else ranks
            low, high = (p.op("prmt.b32", *table, pick) for table in self.tables[index])
            words += [p.op("prmt.b32", low, high, side) for side in ("0x5140", "0x7362")]
        return words


class Gradients:
    """Gradients of similarities: of the own tile in registers, of the streamed tile for an exchange, of the weights.

    The derivative of a score with respect to a similarity is the weight at the similarity's rank. A similarity carries
    the index of its block in its low bits through the sort. The ranks select bytes of the weights, and the products of
    these weights with the gradient of the score are factors of matrix products: with the streamed rows for the gradient
    of the own tile, and transposed with the own rows for that of the streamed tile.
    """

    def __init__(self, network: Network, bases: Sequence[str], weights: Sequence[Sequence[str]]) -> None:
        p = self.p = network.p
        self.network, self.bases, self.dtype = network, bases, network.dtype
        self.ranks = RankedWeights(p, weights, network.dtype)
        self.weights = [[p.op("mov.b32", 0) for _ in range(network.n)] for _ in bases]
        self.nothing = p.op("mov.b32", "0x80008000")  # two times -0, which changes no sum
        self.chunks_of = [
            range(block * network.own.per_block, (block + 1) * network.own.per_block) for block in range(network.n)
        ]

    def start(self) -> None:
        """Sets the gradients of the own tile to zero."""
        p = self.p
        self.own = [[p.op("mov.b32", 0) for _ in range(4)] for _ in range(self.network.own.chunks)]
        self.own_sums = [p.op("mov.b32", 0) for _ in range(4)]

    def add(self, grad_of: GradOf) -> list[list[str]]:
        """Adds the gradients of a streamed tile; returns those of its rows, 16 x 8 matrices.

        ``grad_of(half, pair, sorted similarities of each base)`` returns the gradient of a score: of each half of the
        tile four, of two rows with two columns each.
        """
        p, network = self.p, self.network
        own, other = network.own, network.other
        slopes, distance_slopes = self._slopes(grad_of)
        others = [[network.zero] * 4 for _ in range(own.chunks)]
        other_sums = [network.zero] * 4
        streamed, kept = other.matrices(transposed=True), own.matrices(transposed=True)
        for block, factors in enumerate(slopes):
            turned = network.turn(factors)
            for chunk in self.chunks_of[block]:
                network.accumulate(factors, streamed[chunk], self.own[chunk])
                others[chunk] = network.multiply(turned, kept[chunk], others[chunk])
            if "dis" in self.bases:
                factors = distance_slopes[block]
                turned = turned if len(self.bases) == 1 else network.turn(factors)
                marked = p.op("setp.eq.u32", network.row, block, kind="pred")
                column_of_ones = [p.op("selp.b32", _ones(self.dtype), 0, marked)] * 2
                network.accumulate(factors, column_of_ones, self.own_sums)
                other_sums = network.multiply(turned, column_of_ones, other_sums)
        if "dis" in self.bases:
            halves = [other.half(half) for half in HALVES]
            others = self._subtract_rows(others, other_sums, list(zip(*halves, strict=True)))
        return others

    def _slopes(self, grad_of: GradOf) -> tuple[list[list[str]], list[list[str]]]:
        """Adds to the gradient of the weights; returns the derivatives of each block, 16 x 16 matrices.

        The second result is the derivatives with respect to ``dis`` alone.
        """
        p, network, dtype = self.p, self.network, self.dtype
        slopes: list[list[str]] = [[] for _ in range(network.n)]
        distance_slopes: list[list[str]] = [[] for _ in range(network.n)]
        positions = sorted(range(len(self.bases)), key=lambda position: self.bases[position] != "dis")
        for half in HALVES:
            grads, weights = [], []
            similarities = network.similarities(self.bases, half)
            for pair in range(4):
                ordered, at_ranks = [], []
                for position, blocks in enumerate(similarities):
                    values, ranks = self.ranks.sort(network, [four[pair] for four in blocks])
                    ordered.append(values)
                    at_ranks.append(self.ranks.weights(position, ranks))
                grad = grad_of(half, pair, ordered)
                for totals, values in zip(self.weights, ordered, strict=True):
                    for total, value in zip(totals, values, strict=True):
                        p.do("fma.rn.f32", total, grad, value, total)
                grads.append(grad)
                weights.append(at_ranks)
            for row in (0, 1):
                both_grads = p.op(f"cvt.rn.{dtype}x2.f32", grads[2 * row + 1], grads[2 * row])
                for block in range(network.n):
                    slope = self.nothing
                    for position in positions:
                        sides = (weights[2 * row + side][position][block // 2] for side in (0, 1))
                        both = p.op("prmt.b32", *sides, "0x7632" if block % 2 else "0x5410")
                        slope = p.op(f"fma.rn.{dtype}x2", both, both_grads, slope)
                        if self.bases[position] == "dis":
                            distance_slopes[block].append(slope)
                    slopes[block].append(slope)
        return slopes, distance_slopes

    def finish(self) -> list[list[str]]:
        """Returns the gradients of the own tile, 16 x 8 matrices."""
        if "dis" not in self.bases:
            return self.own
        return self._subtract_rows(self.own, self.own_sums, self.network.matrices)

    def _subtract_rows(
        self, chunks: Sequence[Sequence[str]], sums: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """Subtracts rows times the sums of their derivatives, which the difference in ``dis`` contributes."""
        network, results = self.network, []
        for block in range(network.n):
            factors = network.row_sums(sums, block)
            results += [network.subtract(chunks[chunk], factors, rows[chunk]) for chunk in self.chunks_of[block]]
        return results

    def store_weights(self, address: str) -> None:
        """Stores the gradients of the weights, summed over the warp."""
        p, n = self.p, self.network.n
        sums = WarpSums(p, n, 1, 1, self.network.lane)
        start = p.op("add.s64", address, sums.offset, kind="b64")
        for position, (base, totals) in enumerate(zip(self.bases, self.weights, strict=True)):
            reduced = sums.reduce([p.op("mul.f32", total, base_factor(base)) for total in totals])
            p.store_words(start, reduced, sums.first, sums.unit, offset=4 * n * position)


def _ones(dtype: str) -> str:
    """Returns a word of two ones."""
    return "0x3F803F80" if dtype == "bf16" else "0x3C003C00"


class TileExchange:
    """Adds up a tile of gradients over the warps of a program in shared memory, then adds it to its rows in memory."""

    def __init__(self, p: Program, d: int, warps: int, start: int) -> None:
        self.p, self.d, self.warps = p, d, warps
        self.row_bytes = 4 * d + 32  # four adjacent rows then cover all banks
        self.start = p.op("add.u32", p.op("mov.u32", "scratch"), start)
        thread = p.op("mov.u32", "%tid.x")
        self.own = p.op("mad.lo.u32", p.op("shr.u32", thread, 5), ROWS * self.row_bytes, self.start)
        self.units = []
        for unit in range(0, ROWS * d // 4, WARP * warps):
            number = p.op("add.u32", thread, unit)
            row, column = (p.op(f"{part}.u32", number, d // 4) for part in ("div", "rem"))
            place = p.op("mad.lo.u32", column, 16, p.op("mad.lo.u32", row, self.row_bytes, self.start))
            self.units.append((row, place, p.op("mul.wide.u32", number, 16, kind="b64")))

    @staticmethod
    def bytes(d: int, warps: int) -> int:
        """Returns the shared memory it takes."""
        return warps * ROWS * (4 * d + 32)

    def store(self, network: Network, chunks: Sequence[Sequence[str]]) -> None:
        """Stores the 16 x 8 matrices of this warp."""
        p = self.p
        for row in (0, 1):
            number = p.op("add.u32", network.row, 8 * row)
            place = p.op("mad.lo.u32", network.column, 4, p.op("mad.lo.u32", number, self.row_bytes, self.own))
            for chunk, words in enumerate(chunks):
                p.do("st.shared.v2.b32", f"[{place}+{4 * CHUNK * chunk}]", p.vector(words[2 * row : 2 * row + 2]))

    def add(self, address: str, left: str, again: str) -> None:
        """Adds the sums of all warps to the ``left`` rows at an address, or stores them unless ``again`` holds."""
        p = self.p
        p.do("bar.sync", 0)
        for row, place, offset in self.units:
            inside = p.op("setp.lt.s32", row, p.op("min.s32", left, ROWS), kind="pred")
            totals = [p.op("mov.b32", 0) for _ in range(4)]
            for warp in range(self.warps):
                part = [p.op("mov.b32", 0) for _ in range(4)]
                p.load_vector(f"{place}+{warp * ROWS * self.row_bytes}", part, inside, "shared")
                totals = [p.op("add.f32", a, b) for a, b in zip(totals, part, strict=True)]
            p.add_words(p.op("add.s64", address, offset, kind="b64"), totals, inside, again, unit=4)
