"""Which query-key pairs a fused attention kernel counts: masks, the causal order and dropout."""

from typing import NamedTuple

from ahop_layers.ops.gpu.mma import HALVES, ROWS
from ahop_layers.ops.gpu.ptx import Program

LOG2_E = "0f3FB8AA3B"
MINUS_INFINITY = "0fFF800000"

PAIR_ARGUMENTS = ("mask", "mask_query_stride", "mask_key_stride", "seed")
"""64-bit operands of :class:`Pairs`."""


class Rules(NamedTuple):
    """What a kernel applies to its pairs.

    Attributes:
        mask: None, ``"u8"`` for a mask that is nonzero where a pair is blocked, or the PTX type of values to add.
        causal: whether a query only sees the keys up to its own index.
        dropout: whether weights are dropped.
    """

    mask: str | None = None
    causal: bool = False
    dropout: bool = False

    @property
    def may_empty_rows(self) -> bool:
        """Whether a query may see no key of a tile."""
        return self.mask is not None or self.causal


class Pairs:
    """The pairs of a lane in the current tile: two own rows (eight apart), with two adjacent rows of each half.

    Args:
        rules: what applies to the pairs.
        arguments: 64-bit operands, with those of ``PAIR_ARGUMENTS``.
        numbers: 32-bit operands: the index of the head among all heads, the smallest hash of a pair that is kept, and
            the factor of the kept weights.
        side: ``"query"`` or ``"key"``, what the own rows are.
        column: the first of the lane's two columns in a half.
    """

    def __init__(
        self, p: Program, rules: Rules, arguments: dict[str, str], numbers: list[str], side: str, column: str
    ) -> None:
        self.p, self.rules, self.side, self.arguments, self.column = p, rules, side, arguments, column
        self.head, self.threshold, self.factor = numbers
        self.columns = [[p.op("add.u32", column, 8 * half + each) for each in (0, 1)] for half in HALVES]
        if rules.mask:
            self.stride = arguments[f"mask_{'key' if side == 'query' else 'query'}_stride"]
            self.mask_columns = [
                [p.op("mul.lo.s64", p.op("cvt.u64.u32", x, kind="b64"), self.stride, kind="b64") for x in half]
                for half in self.columns
            ]
            self.mask_step = p.op("mul.lo.s64", self.stride, ROWS, kind="b64")
        if rules.dropout:
            low, high = p.new(), p.new()
            p.do("ld.global.v2.b32", p.vector([low, high]), f"[{arguments['seed']}]")
            self.start = mix(p, p.op("xor.b32", low, mix(p, self.head)))
            self.high = high

    def own_rows(self, first: str, row: str, valid: list[str]) -> None:
        """Sets the own rows: ``row`` and ``row + 8`` after row ``first``; ``valid`` says which exist."""
        p = self.p
        self.valid = valid
        self.own = [p.op("add.u32", first, p.op("add.u32", row, offset)) for offset in (0, 8)]
        if self.rules.mask:
            stride = self.arguments[f"mask_{self.side}_stride"]
            self.mask_rows = [
                p.op("mad.lo.s64", p.op("cvt.u64.u32", index, kind="b64"), stride, self.arguments["mask"], kind="b64")
                for index in self.own
            ]
        if self.rules.dropout and self.side == "query":
            self.own_keys = [self._query_key(index) for index in self.own]

    def other_rows(self, first: str) -> None:
        """Sets the streamed tile to the one whose first row has the index in register ``first``."""
        p = self.p
        if self.rules.causal or self.rules.dropout:
            self.others = [[p.op("add.u32", first, column) for column in half] for half in self.columns]
        if self.rules.dropout and self.side == "key":
            self.other_keys = [[self._query_key(index) for index in half] for half in self.others]

    def next_tile(self) -> None:
        """Advances to the next streamed tile."""
        if self.rules.mask:
            for row in self.mask_rows:
                self.p.do("add.s64", row, row, self.mask_step)

    def skip(self, rows: str) -> None:
        """Skips streamed rows before the first tile."""
        if self.rules.mask:
            wide = self.p.op("cvt.u64.u32", rows, kind="b64")
            for row in self.mask_rows:
                self.p.do("mad.lo.s64", row, wide, self.stride, row)

    def masked(self, score: str, half: int, pair: int, left: str) -> str:
        """Returns a score in base 2 with masks applied; columns from ``left`` on are masked."""
        p, row, side = self.p, pair // 2, pair % 2
        counts = p.op("setp.lt.s32", self.columns[half][side], left, kind="pred")
        if self.rules.mask:
            exists = p.op("and.pred", counts, self.valid[row], kind="pred")
            place = p.op("add.s64", self.mask_rows[row], self.mask_columns[half][side], kind="b64")
            if self.rules.mask == "u8":
                byte = p.op("mov.b32", 0)
                p.do(f"@{exists} ld.global.u8", byte, f"[{place}]")
                counts = p.op("and.pred", counts, p.op("setp.eq.u32", byte, 0, kind="pred"), kind="pred")
            else:
                added = p.load_or_zero(place, self.rules.mask, exists)
                score = p.op("fma.rn.f32", added, LOG2_E, score)
        if self.rules.causal:
            own, other = self.own[row], self.others[half][side]
            query, key = (own, other) if self.side == "query" else (other, own)
            counts = p.op("and.pred", counts, p.op("setp.le.s32", key, query, kind="pred"), kind="pred")
        return p.op("selp.b32", score, MINUS_INFINITY, counts)

    def keep(self, half: int, pair: int) -> str:
        """Returns a predicate: whether dropout keeps the pair."""
        p, row, side = self.p, pair // 2, pair % 2
        own, other = self.own[row], self.others[half][side]
        key = other if self.side == "query" else own
        first, second = self.own_keys[row] if self.side == "query" else self.other_keys[half][side]
        x = p.op("mad.lo.u32", key, "0x85ebca6b", first)
        x = _multiply_high_bits(p, x, 16, "0x7feb352d")
        x = p.op("xor.b32", p.op("xor.b32", x, p.op("shr.u32", x, 15)), second)
        x = p.op("mul.lo.u32", x, "0x846ca68b")
        x = p.op("xor.b32", x, p.op("shr.u32", x, 16))
        return p.op("setp.ge.u32", x, self.threshold, kind="pred")

    def _query_key(self, query: str) -> tuple[str, str]:
        """Returns two words that key the random numbers of a query."""
        p = self.p
        first = mix(p, p.op("mad.lo.u32", query, "0x9e3779b9", self.start))
        return first, mix(p, p.op("xor.b32", first, self.high))


def mix(p: Program, x: str) -> str:
    """Returns a hash of a word."""
    x = _multiply_high_bits(p, x, 16, "0x7feb352d")
    x = _multiply_high_bits(p, x, 15, "0x846ca68b")
    return p.op("xor.b32", x, p.op("shr.u32", x, 16))


def _multiply_high_bits(p: Program, x: str, shift: int, factor: str) -> str:
    return p.op("mul.lo.u32", p.op("xor.b32", x, p.op("shr.u32", x, shift)), factor)
