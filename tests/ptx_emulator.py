"""Runs a PTX body of the kernels on the CPU, one program of several warps, to test its logic without a GPU.

The lanes of a warp execute in lockstep: a register is an array with one entry per lane, and branches must agree in all
lanes. Warps run one after the other from barrier to barrier. Memory is one array of bytes for all tensors; addresses
are offsets into it.
"""

import re
from functools import lru_cache

import numpy as np
import torch

WARP = 32
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "u8"}
VIEWS = {"f32": np.float32, "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "s64": np.int64, "b64": np.uint64}


ARITHMETIC = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "rem": np.remainder,
    "mad": lambda a, b, c: a * b + c, "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "neg": np.negative, "abs": np.abs, "min": np.minimum, "max": np.maximum, "ex2": np.exp2, "lg2": np.log2,
    "rcp": np.reciprocal, "copysign": lambda sign, size: np.copysign(size, sign),
}  # fmt: skip


@lru_cache(None)
def parse(line):
    """Returns the predicate or None, the instruction and its operands."""
    predicate, line = line[1:].split(" ", 1) if line.startswith("@") else (None, line)
    code, _, rest = line.rstrip(";").partition(" ")
    return predicate, code, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)


@lru_cache(None)
def literal(name):
    """Returns the number that an operand is, the bits of a float32 for ``0f``, or None for a register."""
    if name.startswith("0f"):
        return int(name[2:], 16)
    return int(name, 0) if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name) else None


def bits(tensor):
    """A NumPy array with the bits of the tensor, which may be bfloat16."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy() if tensor.element_size() == 2 else tensor.numpy()


def error(result, exact):
    """The norm of the difference, relative to that of the exact values."""
    return float((result.double() - exact).norm() / exact.norm())


class Memory:
    """Global memory that holds copies of tensors."""

    def __init__(self, size=1 << 24):
        self.bytes = np.full(size, 0xFF, np.uint8)  # NaN where nothing was stored
        self.end = 64

    def put(self, tensor):
        """Copies an array and returns its address."""
        data = np.ascontiguousarray(tensor)
        address = self.end
        self.bytes[address : address + data.nbytes] = data.view(np.uint8).reshape(-1)
        self.end += -(-data.nbytes // 256) * 256
        return address

    def get(self, address, shape, dtype=np.float32):
        """Returns a copy of an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[address : address + size].view(dtype).reshape(shape).copy()


class Emulator:
    """Executes a body with the operands of its constraints, an array over threads or a number each."""

    def __init__(self, memory, warps=1):
        shared = np.full(1 << 17, 0xFF, np.uint8)
        self.warps = [Warp(memory, shared, index) for index in range(warps)]

    @property
    def executed(self):
        """Instructions of the first warp."""
        return self.warps[0].executed

    def run(self, body, operands):
        """Runs the body; ``operands`` are the values of ``$1``, ``$2``... Warps take turns at barriers."""
        threads = WARP * len(self.warps)
        values = [np.broadcast_to(np.asarray(operand), threads).astype(np.int64) for operand in operands]
        waiting = [
            warp.run(body, [value[WARP * index : WARP * (index + 1)] for value in values])
            for index, warp in enumerate(self.warps)
        ]
        while waiting:
            arrived = [next(warp, "end") for warp in waiting]
            assert len(set(arrived)) == 1, "a warp waits at a barrier that another one does not reach"
            waiting = [] if arrived[0] == "end" else waiting


class Warp:
    """The registers of 32 lanes, which execute in lockstep."""

    def __init__(self, memory, shared, index):
        self.memory, self.shared, self.executed = memory, shared, 0
        lane = np.arange(WARP)
        self.registers = {"%laneid": lane, "%tid.x": WARP * index + lane, "scratch": np.zeros(WARP, np.int64)}

    def run(self, body, operands):
        """Runs the body and yields at barriers of the program."""
        for index, operand in reversed(list(enumerate(operands, 1))):
            body = body.replace(f"${index}", f"operand{index}")
            self.registers[f"operand{index}"] = operand
        body = body.replace("$0", "result")
        lines = [line.strip() for line in body.splitlines()]
        lines = [line for line in lines if line and line not in "{}" and not line.startswith((".reg", ".shared"))]
        labels = {line[:-1]: index for index, line in enumerate(lines) if line.endswith(":")}
        at = 0
        while at < len(lines):
            if lines[at].startswith("bar.sync"):
                yield at
            target = None if lines[at].endswith(":") else self.step(lines[at])
            at = at + 1 if target is None else labels[target]

    def step(self, line):
        """Executes one instruction; returns the label of a taken branch."""
        self.executed += 1
        predicate, code, operands = parse(line)
        guard = np.ones(WARP, bool) if predicate is None else self.registers[predicate].astype(bool)
        head = code.split(".")[0]
        if head == "bra":
            assert guard.all() or not guard.any(), f"lanes disagree: {line}"
            return operands[0] if guard.all() else None
        with np.errstate(all="ignore"):
            if "wide" in code:
                self.do_wide(operands, guard)
            elif head in ARITHMETIC:
                self.arithmetic(code, operands, guard, ARITHMETIC[head])
            else:
                getattr(self, f"do_{head}")(code, operands, guard)
        return None

    def value(self, name, kind):
        """Returns an operand as an array of the type ``kind``."""
        number, wide = literal(name), np.dtype(VIEWS[kind])
        if name.startswith("0f"):
            return np.full(WARP, number, np.uint32).view(wide)
        if number is not None:
            return np.full(WARP, number, np.int64).astype(np.int32 if wide == np.float32 else wide).view(wide)
        register = self.registers[name]
        if register.dtype.kind == "b":
            return register
        return register.astype(np.uint64).astype(f"u{wide.itemsize}").view(wide)

    def set(self, name, array, guard=None):
        """Stores an array into a register, as unsigned bits."""
        array = np.asarray(array)
        if array.dtype.kind != "b":
            array = array.view(f"u{array.dtype.itemsize}")
        if guard is not None and not guard.all():
            array = np.where(guard, array, self.registers.get(name, np.zeros(WARP, array.dtype)))
        self.registers[name] = array

    def do_mov(self, code, operands, guard):
        if operands[0].startswith("{"):  # unpack a word into halves
            low, high = operands[0].strip("{}").split(", ")
            word = self.value(operands[1], "u32")
            self.set(low, (word & 0xFFFF).astype(np.uint16))
            self.set(high, (word >> 16).astype(np.uint16))
        elif "pred" in code:
            self.set(operands[0], self.registers[operands[1]].astype(bool), guard)
        else:
            self.set(operands[0], self.value(operands[1], "b64" if "64" in code else "b32"), guard)

    def arithmetic(self, code, operands, guard, function):
        kind = code.split(".")[-1]
        if kind in ("bf16x2", "f16x2"):
            parts = [self.halves(self.value(name, "u32"), kind) for name in operands[1:]]
            results = [function(*(part[side] for part in parts)) for side in (0, 1)]
            self.set(operands[0], self.pack(*results, kind), guard)
            return
        kind = kind if kind in VIEWS else "b32"
        inputs = [self.value(name, kind) for name in operands[1:]]
        self.set(operands[0], np.asarray(function(*inputs)).astype(VIEWS[kind]), guard)

    def halves(self, word, kind):
        low, high = (word & 0xFFFF).astype(np.uint32), (word >> 16).astype(np.uint32)
        return tuple(self.widen(part, kind) for part in (low, high))

    def widen(self, half, kind):
        if kind.startswith("bf16"):
            return (half.astype(np.uint32) << 16).view(np.float32)
        return half.astype(np.uint16).view(np.float16).astype(np.float32)

    def narrow(self, value, kind):
        if kind.startswith("f16"):
            return value.astype(np.float16).view(np.uint16).astype(np.uint32)
        bits = np.asarray(value, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)

    def pack(self, low, high, kind):
        return (self.narrow(low, kind) | (self.narrow(high, kind) << 16)).astype(np.uint32)

    def do_wide(self, operands, guard):
        """The product of two words as 64 bits, plus the third operand where there is one."""
        product = self.value(operands[1], "u32").astype(np.uint64) * self.value(operands[2], "u32")
        addend = self.value(operands[3], "b64") if len(operands) > 3 else np.uint64(0)
        self.set(operands[0], product + addend, guard)

    def do_shf(self, code, operands, guard):
        low, high, by = (self.value(name, "u32").astype(np.uint64) for name in operands[1:])
        both = (high << np.uint64(32) | low) << (by & np.uint64(31))
        self.set(operands[0], (both >> np.uint64(32)).astype(np.uint32), guard)

    def logic(self, code, operands, guard):
        function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[code.split(".")[0]]
        if "pred" in code:
            self.set(operands[0], function(*(self.registers[name].astype(bool) for name in operands[1:])), guard)
        else:
            self.set(operands[0], function(*(self.value(name, "u32") for name in operands[1:])), guard)

    do_and = do_or = do_xor = logic

    def do_shl(self, code, operands, guard):
        a, b = self.value(operands[1], "u32"), self.value(operands[2], "u32")
        self.set(operands[0], np.where(b < 32, a << np.minimum(b, 31), 0).astype(np.uint32), guard)

    def do_shr(self, code, operands, guard):
        kind = "s32" if "s32" in code else "u32"
        self.set(
            operands[0], self.value(operands[1], kind) >> self.value(operands[2], "u32").astype(VIEWS[kind]), guard
        )

    def do_lop3(self, code, operands, guard):
        a, b, c = (self.value(name, "u32") for name in operands[1:4])
        table = int(operands[4], 0)
        result = np.zeros(WARP, np.uint32)
        for index in range(8):
            if table >> index & 1:
                terms = [x if index >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
                result |= terms[0] & terms[1] & terms[2]
        self.set(operands[0], result, guard)

    def do_prmt(self, code, operands, guard):
        both = self.value(operands[1], "u32").astype(np.uint64) | (
            self.value(operands[2], "u32").astype(np.uint64) << 32
        )
        pick = self.value(operands[3], "u32")
        result = np.zeros(WARP, np.uint64)
        for place in range(4):
            nibble = (pick >> np.uint32(4 * place)) & 0xF
            assert (nibble < 8).all(), "prmt replicates signs"
            result |= ((both >> (8 * nibble.astype(np.uint64))) & 0xFF) << np.uint64(8 * place)
        self.set(operands[0], result.astype(np.uint32), guard)

    def do_setp(self, code, operands, guard):
        _, comparison, kind = code.split(".")
        a, b = (self.value(name, kind) for name in operands[1:])
        compare = {"gt": np.greater, "lt": np.less, "ge": np.greater_equal, "le": np.less_equal, "eq": np.equal}
        self.set(operands[0], compare.get(comparison, np.not_equal)(a, b), guard)

    def do_selp(self, code, operands, guard):
        a, b = (self.value(name, "u32") for name in operands[1:3])
        self.set(operands[0], np.where(self.registers[operands[3]].astype(bool), a, b).astype(np.uint32), guard)

    def do_cvt(self, code, operands, guard):
        target, source = code.split(".")[-2:]
        if target.endswith("x2"):  # the first source is the upper half
            high, low = (self.value(name, "f32") for name in operands[1:])
            self.set(operands[0], self.pack(low, high, target), guard)
        elif target[1:] in ("64", "32") and source[1:] in ("64", "32"):
            wide = self.value(operands[1], source if source in VIEWS else "b64").astype(VIEWS.get(target, np.uint64))
            self.set(operands[0], wide, guard)
        elif target in ("f16", "bf16"):
            self.set(operands[0], self.narrow(self.value(operands[1], "f32"), target).astype(np.uint16), guard)
        elif source == "f16":
            self.set(operands[0], self.widen(self.registers[operands[1]], "f16"), guard)
        else:
            self.set(operands[0], self.registers[operands[1]].astype(np.uint32), guard)

    def do_shfl(self, code, operands, guard):
        source = self.value(operands[2], "u32") if ".idx" in code else np.arange(WARP) ^ int(operands[2])
        self.set(operands[0], self.value(operands[1], "u32")[source])

    def do_vote(self, code, operands, guard):
        self.set(operands[0], np.full(WARP, self.registers[operands[1]].astype(bool).all()))

    def do_bar(self, code, operands, guard):
        pass

    def place(self, operand):
        """Returns the addresses of an operand ``[register+offset]``."""
        name, *offsets = operand.strip("[]").split("+")
        return self.registers[name].astype(np.int64) + sum(int(offset) for offset in offsets)

    def places(self, code, operand, guard, size, count):
        """Yields the memory and the indices of the bytes of each of ``count`` words, for the lanes of the guard."""
        memory, address = self.shared if "shared" in code else self.memory.bytes, self.place(operand)[guard]
        assert (address % (size * count) == 0).all(), f"misaligned: {code}"
        assert ((address >= 0) & (address <= len(memory) - size * count)).all(), f"out of bounds: {code}"
        for index in range(count):
            yield memory, address[:, None] + size * index + np.arange(size)

    def do_ld(self, code, operands, guard):
        size = 1 if "u8" in code else 2 if "b16" in code else 4
        names = operands[0].strip("{}").split(", ")
        for name, (memory, places) in zip(names, self.places(code, operands[1], guard, size, len(names)), strict=True):
            result = np.array(self.registers.get(name, np.zeros(WARP))).astype(f"u{size}")
            result[guard] = memory[places].view(f"u{size}")[:, 0]
            self.registers[name] = result.astype(np.uint32) if size == 1 else result

    def do_st(self, code, operands, guard):
        size = 2 if "b16" in code else 4
        names = operands[1].strip("{}").split(", ")
        for name, (memory, places) in zip(names, self.places(code, operands[0], guard, size, len(names)), strict=True):
            memory[places] = self.value(name, "u32")[guard].astype(f"u{size}")[:, None].view(np.uint8)

    def do_ldmatrix(self, code, operands, guard):
        rows = self.place(operands[1]).reshape(-1, 8)
        for name, places in zip(operands[0].strip("{}").split(", "), rows, strict=False):
            matrix = self.shared[places[:, None] + np.arange(16)].view(np.uint16)
            matrix = matrix.T if "trans" in code else matrix
            self.set(name, np.ascontiguousarray(matrix).view(np.uint32).reshape(-1))

    def do_movmatrix(self, code, operands, guard):
        matrix = np.ascontiguousarray(self.value(operands[1], "u32").reshape(8, 4)).view(np.uint16)
        self.set(operands[0], np.ascontiguousarray(matrix.T).view(np.uint32).reshape(-1))

    def do_mma(self, code, operands, guard):
        """``m16n8k8`` and ``m16n8k16`` with float32 accumulators."""
        kind = "bf16" if "bf16" in code else "f16"
        groups = [operand.strip("{}").split(", ") for operand in operands]
        depth = 8 * len(groups[2])
        a, b = np.zeros((16, depth), np.float32), np.zeros((depth, 8), np.float32)
        row, col = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
        for index, name in enumerate(groups[1]):
            for side, part in enumerate(self.halves(self.value(name, "u32"), kind)):
                a[row + 8 * (index % 2), col + side + 8 * (index // 2)] = part
        for index, name in enumerate(groups[2]):
            for side, part in enumerate(self.halves(self.value(name, "u32"), kind)):
                b[col + side + 8 * index, row] = part
        product = a.astype(np.float64) @ b
        for index, (name, start) in enumerate(zip(groups[0], groups[3], strict=True)):
            total = product[row + 8 * (index // 2), col + index % 2] + self.value(start, "f32")
            self.set(name, total.astype(np.float32))
