"""Tiles of tensor cores: rows in shared memory, similarities of their blocks in registers, sorted by each lane.

A warp owns a tile of 16 rows (of keys or queries, all bases are symmetric) and streams the rows of the other side, 16
at a time, through shared memory. ``mma`` leaves the similarities of 16 x 8 pairs in the registers of the warp, four
pairs per lane, and a lane sorts the blocks of its pairs by itself. ``dis`` is computed as half of it, ``q k - q^2 / 2
- k^2 / 2``, in float32, and its weights are doubled. The error of ``dis`` grows with the square of the distance from
the origin, measured in distances between query and key: it reaches the rounding of bfloat16 at about 200, that of
float16 at about 70. In the backward pass the products of weights and the scores' gradient are rounded to the dtype of
the inputs, so float16 needs a scaled loss, as it does for attention by matrix products.
"""

from collections.abc import Sequence

from ahop_layers.ops.gpu.networks import sorting_network
from ahop_layers.ops.gpu.ptx import WARP, Program

ROWS = 16
"""Rows of a tile."""

CHUNK = 8
"""Dimensions that one ``mma`` multiplies."""

MAX_BLOCKS = 8
"""The largest number of blocks: a rank then fits in the three bits that select a byte."""

MAX_DIMENSIONS = 128
"""The largest number of dimensions: gradients of a tile stay in registers."""

HALVES = (0, 1)
"""The 8 streamed rows that one ``mma`` covers: first or second half of a tile."""


def serves(n: int, size: int, bases: Sequence[str]) -> bool:
    """Returns whether these kernels process ``n`` blocks of ``size`` dimensions."""
    chunks, rest = divmod(size, CHUNK)
    whole = rest == 0 and chunks & (chunks - 1) == 0 and n * chunks > 1
    return whole and n <= MAX_BLOCKS and n * size <= MAX_DIMENSIONS and set(bases) <= {"dis", "dot"}


class Tile:
    """Rows in shared memory, and half of their negative squared norms per block, ``(n, ROWS)`` in float32.

    The threads of a warp, or of several ``warps``, store it together.
    """

    def __init__(self, p: Program, n: int, size: int, dtype: str, start: str, warps: int = 1) -> None:
        self.p, self.n, self.dtype, self.warps = p, n, dtype, warps
        self.chunks, self.per_block = n * size // CHUNK, size // CHUNK
        self.row_bytes = row_bytes(n * size)
        self.norms = p.op("add.u32", start, ROWS * self.row_bytes)
        self.places, self.columns, self.numbers, self.norm_places, self.exist = [], [], [], [], []
        lane = p.op("mov.u32", "%laneid")
        thread, units = p.op("mov.u32", "%tid.x") if warps > 1 else lane, ROWS * self.chunks
        for unit in range(0, units, WARP * warps):
            number = p.op("add.u32", thread, unit)
            row, chunk = (p.op(f"{part}.u32", number, self.chunks) for part in ("div", "rem"))
            place = p.op("mad.lo.u32", row, self.row_bytes, start)
            self.places.append(p.op("mad.lo.u32", chunk, 2 * CHUNK, place))
            self.columns.append(p.op("mul.lo.u32", chunk, 2 * CHUNK))
            self.numbers.append(row)
            self.exist.append(p.op("setp.lt.u32", number, units, kind="pred"))
            block = p.op("div.u32", chunk, self.per_block)
            self.norm_places.append(p.op("mad.lo.u32", p.op("mad.lo.u32", block, ROWS, row), 4, self.norms))
        first = p.op("and.b32", lane, self.per_block - 1)
        self.first = p.op("setp.eq.u32", first, 0, kind="pred")
        # Addresses of the rows of matrices: two chunks of all rows, or four chunks of eight rows.
        low, high = p.op("and.b32", lane, ROWS - 1), p.op("shr.u32", lane, 4)
        self.pair = p.op("mad.lo.u32", high, 2 * CHUNK, p.op("mad.lo.u32", low, self.row_bytes, start))
        low, high = p.op("and.b32", lane, CHUNK - 1), p.op("shr.u32", lane, 3)
        self.quad = p.op("mad.lo.u32", high, 2 * CHUNK, p.op("mad.lo.u32", low, self.row_bytes, start))

    def registers(self) -> list[list[str]]:
        """Returns registers for the rows of this lane."""
        return [[self.p.new() for _ in range(4)] for _ in self.places]

    def fetch(self, address: str, stride: str, left: str, words: list[list[str]]) -> list[list[str]]:
        """Loads the rows at an address into registers; rows from ``left`` on are zero."""
        p = self.p
        for row, column, unit, exists in zip(self.numbers, self.columns, words, self.exist, strict=True):
            inside = p.op("and.pred", exists, p.op("setp.lt.s32", row, left, kind="pred"), kind="pred")
            place = p.op("mad.lo.s64", p.op("cvt.u64.u32", row, kind="b64"), stride, address, kind="b64")
            place = p.op("add.s64", place, p.op("cvt.u64.u32", column, kind="b64"), kind="b64")
            for word in unit:
                p.do("mov.b32", word, 0)
            p.load_vector(place, unit, inside)
        return words

    def synchronize(self) -> None:
        """Emits a barrier of the threads that store the tile."""
        if self.warps > 1:
            self.p.do("bar.sync", 0)
        else:
            self.p.do("bar.warp.sync", "0xffffffff")

    def put(self, words: Sequence[Sequence[str]], norms: bool) -> None:
        """Stores fetched rows and their norms, between two barriers."""
        self.synchronize()  # all reads of the previous rows are finished
        self.store(words, norms)
        self.synchronize()

    def store(self, words: Sequence[Sequence[str]], norms: bool) -> None:
        """Stores fetched rows and their norms."""
        p = self.p
        for unit, place, norm_place, exists in zip(words, self.places, self.norm_places, self.exist, strict=True):
            p.do(f"@{exists} st.shared.v4.b32", f"[{place}]", p.vector(unit))
            if not norms:
                continue
            total = None
            for word in unit:
                for x in p.unpack(word, self.dtype):
                    total = p.op("mul.f32", x, x) if total is None else p.op("fma.rn.f32", x, x, total)
            total = p.op("mul.f32", total, "0fBF000000")  # -1/2
            for distance in (1 << level for level in range(self.per_block.bit_length() - 1)):
                total = p.op("add.f32", total, p.shuffle(total, distance))
            stores = p.op("and.pred", exists, self.first, kind="pred")
            p.do(f"@{stores} st.shared.b32", f"[{norm_place}]", total)

    def matrices(self, transposed: bool = False) -> list[list[str]]:
        """Returns 16 x 8 matrices of all chunks, two registers each: rows and dimensions, or their transpose."""
        kind = "ldmatrix.sync.aligned.m8n8" + (".x4.trans" if transposed else ".x4") + ".shared.b16"
        results: list[list[str]] = []
        for chunk in range(0, self.chunks, 2):
            words = [self.p.new() for _ in range(4)]
            self.p.do(kind, self.p.vector(words), f"[{self.pair}+{2 * CHUNK * chunk}]")
            results += [words[:2], words[2:]]
        return results[: self.chunks]

    def half(self, half: int) -> list[str]:
        """Returns 8 x 8 matrices of all chunks, one register each, of the first or second eight rows."""
        results: list[str] = []
        offset = half * 8 * self.row_bytes
        for chunk in range(0, self.chunks, 4):
            words = [self.p.new() for _ in range(4)]
            place = f"[{self.quad}+{offset + 2 * CHUNK * chunk}]"
            self.p.do("ldmatrix.sync.aligned.m8n8.x4.shared.b16", self.p.vector(words), place)
            results += words
        return results[: self.chunks]


def row_bytes(d: int) -> int:
    """Returns the distance of rows in shared memory, an odd number of 16 bytes, so that no two rows share banks.

    Matrices are loaded four at a time, so a row has room for a multiple of four chunks.
    """
    units = -(-d // (4 * CHUNK)) * 4
    return 16 * (units + 1)


def tile_bytes(n: int, d: int) -> int:
    """Returns the shared memory of a :class:`Tile`."""
    return ROWS * row_bytes(d) + 4 * ROWS * n


class Network:
    """Similarities of a tile in the registers of a warp, and products with them."""

    def __init__(self, p: Program, n: int, dtype: str, own: Tile, other: Tile) -> None:
        self.p, self.n, self.dtype, self.own, self.other = p, n, dtype, own, other
        lane = self.lane = p.op("mov.u32", "%laneid")
        self.row = p.op("shr.u32", lane, 2)  # of 8, the first row of this lane's pairs
        self.column = p.op("shl.b32", p.op("and.b32", lane, 3), 1)  # of 8, the first of two columns of its pairs
        self.zero = p.op("mov.b32", 0)
        self.column_norms = p.op("mad.lo.u32", self.column, 4, other.norms)
        self.row_norms: list[list[str]] = []

    def load_own(self, norms: bool) -> None:
        """Loads the matrices of the own tile, and the norms of this lane's rows."""
        p = self.p
        self.matrices = self.own.matrices()
        if norms:
            start = p.op("mad.lo.u32", self.row, 4, self.own.norms)
            for block in range(self.n):
                places = (f"[{start}+{4 * (ROWS * block + offset)}]" for offset in (0, 8))
                self.row_norms.append([p.op("ld.shared.b32", place) for place in places])

    def similarities(self, bases: Sequence[str], half: int) -> list[list[list[str]]]:
        """Returns four similarities per base and block: of two rows (eight apart) with two adjacent columns each."""
        p, columns, step = self.p, self.other.half(half), 2 - self.own.per_block % 2
        results: list[list[list[str]]] = [[] for _ in bases]
        for block in range(self.n):
            norms = [self.zero] * 4
            if "dis" in bases:
                place = f"{self.column_norms}+{4 * (ROWS * block + 8 * half)}"
                column_norms = p.load_vector(place, [p.new(), p.new()], space="shared")
                norms = [p.op("add.f32", row, column) for row in self.row_norms[block] for column in column_norms]
            total = norms if len(bases) == 1 else [self.zero] * 4
            for chunk in range(block * self.own.per_block, (block + 1) * self.own.per_block, step):
                matrix = [word for words in self.matrices[chunk : chunk + step] for word in words]
                total = self.multiply(matrix, columns[chunk : chunk + step], total)
            for base, found in zip(bases, results, strict=True):
                apart = base == "dis" and len(bases) > 1
                found.append([p.op("add.f32", x, y) for x, y in zip(total, norms, strict=True)] if apart else total)
        return results

    def multiply(self, a: Sequence[str], b: Sequence[str], total: Sequence[str]) -> list[str]:
        """Returns ``a @ b + total`` for matrices of 16 x 8 and 8 x 8, or 16 x 16 and 16 x 8."""
        p, results = self.p, [self.p.new() for _ in range(4)]
        kind = f"mma.sync.aligned.m16n8k{CHUNK * len(b)}.row.col.f32.{self.dtype}.{self.dtype}.f32"
        p.do(kind, *(f"{{{', '.join(registers)}}}" for registers in (results, a, b, total)))
        return results

    def accumulate(self, a: Sequence[str], b: Sequence[str], total: Sequence[str]) -> None:
        """Adds ``a @ b`` to the registers ``total``."""
        for register, result in zip(total, self.multiply(a, b, total), strict=True):
            self.p.do("mov.b32", register, result)

    def turn(self, matrix: Sequence[str]) -> list[str]:
        """Returns the transpose of a 16 x 16 matrix."""
        return [self.p.op("movmatrix.sync.aligned.m8n8.trans.b16", matrix[index]) for index in (0, 2, 1, 3)]

    def row_sums(self, sums: Sequence[str], block: int) -> list[str]:
        """Returns column ``block`` of a 16 x 8 matrix for the two rows of this lane."""
        p = self.p
        source = p.op("add.u32", p.op("and.b32", self.lane, WARP - 4), block // 2)
        return [p.op("shfl.sync.idx.b32", sums[2 * row + block % 2], source, 31, "0xffffffff") for row in (0, 1)]

    def subtract(self, total: Sequence[str], factors: Sequence[str], rows: Sequence[str]) -> list[str]:
        """Returns a 16 x 8 matrix minus rows times their factors."""
        p, results = self.p, []
        for row, (factor, word) in enumerate(zip(factors, rows, strict=True)):
            negative = p.op("neg.f32", factor)
            for side, x in enumerate(p.unpack(word, self.dtype)):
                results.append(p.op("fma.rn.f32", negative, x, total[2 * row + side]))
        return results

    def sort(self, values: list[str], kind: str) -> list[str]:
        """Returns values in descending order."""
        values = list(values)
        for low, high in sorting_network(self.n).comparators:
            a, b = values[low], values[high]
            values[low], values[high] = (self.p.op(f"{side}.{kind}", a, b) for side in ("max", "min"))
        return values


def make_tiles(p: Program, n: int, size: int, dtype: str, warps: int) -> tuple[Tile, Tile]:
    """Returns the own tile of this warp and the streamed tile of the program."""
    step = tile_bytes(n, n * size)
    scratch = p.op("mov.u32", "scratch")
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    own = p.op("mad.lo.u32", p.op("add.u32", warp, 1), step, scratch)
    return Tile(p, n, size, dtype, own), Tile(p, n, size, dtype, scratch, warps)


def shared_bytes(n: int, d: int, warps: int) -> int:
    """Returns the shared memory of the tiles of a program."""
    return (warps + 1) * tile_bytes(n, d)


def rows_left(p: Program, count: str, first: str) -> str:
    """Returns how many rows of a tile exist, from row ``first`` on; none or fewer if the tile lies past the end."""
    left = p.op("min.s64", p.op("sub.s64", count, first, kind="b64"), ROWS, kind="b64")
    return p.op("cvt.s32.s64", p.op("max.s64", left, 0, kind="b64"))


def load_weights(p: Program, n: int, bases: Sequence[str], weight: str, folds: bool = False) -> list[list[str]]:
    """Loads the weights of each base, times :func:`base_factor`; ``folds`` weights that are not folded yet."""
    results = []
    for index, base in enumerate(bases):
        words = p.load_words(weight, n, 4 * n * index)
        for position in reversed(range(n - 1)) if folds else ():
            words[position] = p.op("add.f32", words[position], words[position + 1])
        results.append([p.op("mul.f32", word, base_factor(base)) for word in words])
    return results


def base_factor(base: str) -> str:
    """Returns the factor of the weights: ``dis`` is computed as half of it."""
    return "0f40000000" if base == "dis" else "0f3F800000"
