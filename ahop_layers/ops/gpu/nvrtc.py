"""CUDA C++ kernels: compiled by NVRTC at first use, kept on disk, and launched through the CUDA driver.

torch's CUDA wheels bring NVRTC, and the driver is there with a GPU, so ctypes is all it takes. ``AHOP_CACHE_DIR`` is
the directory of compiled kernels, by default ``~/.cache/ahop_layers``.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ahop_layers.errors import AHopError

Constants = tuple[tuple[str, int], ...]
"""The names and values of what a source is compiled for, hashable."""

SOURCES = Path(__file__).parent / "cuda"
# Attributes of shared memory: the most that a function, a thread block and a multiprocessor may use.
_OF_FUNCTION, _OF_THREAD_BLOCK, _OF_MULTIPROCESSOR = 8, 97, 81
_NO_CONTEXT = 201


def unavailable() -> str | None:
    """Returns the reason why CUDA C++ kernels cannot be compiled here, or None if they can."""
    return "torch is built without CUDA" if torch.version.cuda is None else library_error()


@lru_cache(maxsize=None)
def library_error() -> str | None:
    """Returns why NVRTC cannot be loaded, or None if it can."""
    try:
        _nvrtc()
    except OSError as error:
        return f"NVRTC was not found: {error}"
    return None


def version() -> tuple[int, int]:
    """Returns the version of NVRTC."""
    numbers = c_int(), c_int()
    _nvrtc().nvrtcVersion(byref(numbers[0]), byref(numbers[1]))
    return numbers[0].value, numbers[1].value


def cache_directory() -> Path:
    """Returns the directory of compiled kernels."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("AHOP_CACHE_DIR") or Path(home) / "ahop_layers")


@lru_cache(maxsize=None)
def _nvrtc() -> Any:
    """Loads NVRTC from torch's wheels or from the system."""
    name = f"libnvrtc.so.{(torch.version.cuda or '12').split('.')[0]}"
    places = (find_spec("nvidia") or torch.__spec__).submodule_search_locations or []
    found = [path for place in places for path in sorted(Path(place).glob(f"*/lib/{name}"))]
    return ctypes.CDLL(str(found[0]) if found else name)


def compile_source(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Compiles a file of :data:`SOURCES` for an architecture such as ``"sm_90a"``; returns the binary.

    A constant ``name`` is the macro ``AHOP_NAME``. Raises AHopError with the compiler's log.
    """
    nvrtc = _nvrtc()
    headers = sorted(SOURCES.glob("*.cuh"))
    texts = (c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (c_char_p * len(headers))(*(path.name.encode() for path in headers))
    program = c_void_p()
    nvrtc.nvrtcCreateProgram(
        byref(program), (SOURCES / source).read_bytes(), source.encode(), len(headers), texts, names
    )
    # A virtual architecture such as compute_90 gives PTX, which the driver compiles.
    kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
    flags = [f"-arch={architecture}", "-std=c++17", "-default-device", "-diag-suppress=128"]
    flags += [f"-DAHOP_{name.upper()}={int(value)}" for name, value in constants.items()]
    options = (c_char_p * len(flags))(*(flag.encode() for flag in flags))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), options):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
            raise AHopError(f"{source} does not compile for {architecture} with {dict(constants)}:\n{log}")
        return _read(getattr(nvrtc, f"nvrtcGet{kind}Size"), getattr(nvrtc, f"nvrtcGet{kind}"), program)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _read(size: Any, content: Any, program: c_void_p) -> bytes:
    length = c_size_t()
    size(program, byref(length))
    buffer = ctypes.create_string_buffer(length.value)
    content(program, buffer)
    return buffer.raw


def compiled(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Returns the binary of :func:`compile_source` from the cache, or compiles it.

    A file of the cache starts with the hash of the rest. It is written under another name and renamed, so a process
    that reads while another one writes sees all of a file or none.
    """
    parts = [version(), architecture, source, sorted(constants.items())]
    texts = [path.read_bytes() for path in sorted((*SOURCES.glob("*.cuh"), SOURCES / source))]
    key = hashlib.sha256(repr(parts).encode() + b"".join(texts)).hexdigest()
    path = cache_directory() / f"{Path(source).stem}-{key[:32]}.bin"
    try:
        digest, content = (data := path.read_bytes())[:32], data[32:]
        if hashlib.sha256(content).digest() == digest:
            return content
    except OSError:
        pass
    content = compile_source(source, constants, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(file.name, path)
    except OSError:  # a home that cannot be written: every process compiles
        pass
    return content


@lru_cache(maxsize=None)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernel.argtypes = [c_void_p, *[ctypes.c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return driver


def _check(status: int, action: str) -> None:
    if status:
        text = c_char_p()
        _driver().cuGetErrorString(status, byref(text))
        raise AHopError(f"CUDA could not {action}: {(text.value or b'unknown error').decode()} ({status})")


def _enter_context(index: int) -> None:
    """Makes the primary context of a device, which torch uses, current in this thread."""
    context = c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), index), "get the context of the device")
    _check(_driver().cuCtxSetCurrent(context), "set the context of the device")


@lru_cache(maxsize=None)
def shared_limits(index: int) -> tuple[int, int]:
    """Returns the bytes of shared memory of a thread block and of a multiprocessor on a device."""
    values = c_int(), c_int()
    for value, attribute in zip(values, (_OF_THREAD_BLOCK, _OF_MULTIPROCESSOR), strict=True):
        _check(_driver().cuDeviceGetAttribute(byref(value), attribute, index), "read an attribute of the device")
    return values[0].value, values[1].value


@lru_cache(maxsize=None)
def architecture(index: int) -> str:
    """Returns the architecture to compile for: the device's own, or the newest before it that this NVRTC knows."""
    major, minor = torch.cuda.get_device_capability(index)
    nvrtc, count = _nvrtc(), c_int()
    nvrtc.nvrtcGetNumSupportedArchs(byref(count))
    known = (c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    number = 10 * major + minor
    older = [each for each in known if each <= number]  # whose PTX the driver compiles for the device
    return f"sm_{number}{'a' * (number == 90)}" if number in known else f"compute_{max(older, default=number)}"


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU for which kernels can be compiled, (0, 0) of other devices."""
    return _capability(device)


# The compiler cannot trace a search for libraries. torch.compiler.assume_constant_result would import the compiler.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=None)
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None or unavailable() is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


class Kernel:
    """A function of a compiled source file on one device."""

    def __init__(self, source: str, name: str, constants: Constants, index: int) -> None:
        self.name, self.index, driver = name, index, _driver()
        self._launch = driver.cuLaunchKernel
        self.function = c_void_p()
        with torch.cuda.device(index):
            _enter_context(index)
            module = _module(source, constants, index)
            _check(driver.cuModuleGetFunction(byref(self.function), module, name.encode()), f"find the kernel {name}")
            most = shared_limits(index)[0]
            _check(driver.cuFuncSetAttribute(self.function, _OF_FUNCTION, most), f"give {name} {most} bytes")

    def launch(self, thread_blocks: int, threads: int, shared: int, arguments: bytes, stream: int) -> None:
        """Runs the kernel, whose only parameter is a structure, on a stream of the current device."""
        places = (c_char_p * 1)(arguments)  # an array of addresses, one for each parameter
        status = self._launch(self.function, thread_blocks, 1, 1, threads, 1, 1, shared, stream, places, None)
        if status == _NO_CONTEXT:  # a new thread, such as one of autograd
            _enter_context(self.index)
            status = self._launch(self.function, thread_blocks, 1, 1, threads, 1, 1, shared, stream, places, None)
        if status:
            _check(status, f"launch {self.name}: {thread_blocks} thread blocks, {threads} threads, {shared} bytes")


kernel = lru_cache(maxsize=None)(Kernel)


@lru_cache(maxsize=None)
def _module(source: str, constants: Constants, index: int) -> c_void_p:
    module = c_void_p()
    image = compiled(source, dict(constants), architecture(index))
    _check(_driver().cuModuleLoadData(byref(module), image), f"load {source}")
    return module


def compile_together(programs: Sequence[tuple[str, Constants]], index: int) -> None:
    """Compiles sources with their constants at the same time, one in each thread, and loads them on a device."""

    def load(program: tuple[str, Constants]) -> None:
        _enter_context(index)
        _module(*program, index)

    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(load, programs))


def run(device: torch.device, launches: Sequence[tuple[Kernel, int, int, int]], arguments: bytes) -> None:
    """Runs kernels on the current stream of a device, each with a number of thread blocks, threads and bytes."""
    stream = 0  # of tests, which run kernels on the CPU
    if device.type == "cuda":
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return run(device, launches, arguments)
        # Private, but code that torch.compile generates calls it, too: the public way takes as long as a launch.
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    for kernel, thread_blocks, threads, shared in launches:
        kernel.launch(thread_blocks, threads, shared, arguments, stream)
