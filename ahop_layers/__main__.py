"""``python -m ahop_layers``: prints versions, devices and available backends, and tests each backend."""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

import ahop_layers as ah
from ahop_layers.ops import reference
from ahop_layers.ops.gpu import nvrtc

LIBRARIES = ("einops", "hopfield-layers", "lightning", "scikit-learn", "timm", "transformers")


def installed(name: str) -> str:
    """Returns the version of a library, or that it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def self_test(backend: str, device: str) -> str:
    """Compares the scores of a backend with the float64 reference; returns both errors and the time."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(rows, 24, generator=generator) for rows in (40, 90))
    weight, bases = torch.rand(2, 24, generator=generator), ("dis", "dot")
    exact = reference.adaptive_similarity(query.double(), key.double(), weight.double(), bases)
    baseline = (reference.adaptive_similarity(query, key, weight, bases) - exact).abs().max()
    start = time.perf_counter()
    inputs = query.to(device), key.to(device), weight.to(device)
    scores = ah.adaptive_similarity(*inputs, bases=bases, backend=backend).cpu()
    seconds = time.perf_counter() - start
    error = (scores - exact).abs().max()
    verdict = "ok" if error <= 2 * baseline + 1e-6 else "WRONG"
    return f"{verdict}: error {error:.1e}, float32 reference {baseline:.1e}, {seconds:.2f} s"


def _device(backend: str) -> str:
    """Returns the device on which a backend is tested: plain PyTorch on an Apple GPU, if there is one."""
    if backend == "cuda" and torch.cuda.is_available():
        return "cuda"
    return "mps" if backend == "chunked" and torch.backends.mps.is_available() else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if an available backend fails or computes wrong scores, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m ahop_layers",
        description="Print versions, devices and backends, and compare each available backend with the reference. The"
        " exit status is 1 if a backend fails or computes wrong scores.",
    )
    parser.add_argument("--version", action="version", version=f"ahop-layers {ah.__version__}")
    parser.parse_args(arguments)
    print(f"ahop-layers {ah.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join([f"torch {torch.__version__}", *(f"{name} {installed(name)}" for name in LIBRARIES)]))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    gpus += ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []
    print("devices: " + ", ".join([f"CPU with {torch.get_num_threads()} threads", *gpus]))
    print(f"compiled kernels: {nvrtc.cache_directory()}\n")
    wrong = False
    for name, (available, detail) in ah.backends().items():
        result = ""
        if available:
            try:
                result = self_test(name, _device(name))
            except Exception as error:  # the report shows any failure of a backend
                result = f"FAILED: {type(error).__name__}: {error}"
            wrong |= not result.startswith("ok")
        print(f"{name:9}  {'' if available else 'unavailable: '}{detail}" + (f"\n{'':9}  {result}" if result else ""))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
