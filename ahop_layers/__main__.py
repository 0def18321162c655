"""``python -m ahop_layers``: prints versions, devices and backends, tests each backend, and times a layer."""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

import ahop_layers as ah
from ahop_layers.hopfield import HopfieldLayer
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


def cost_of_switching(device: str, seconds: float = 0.5) -> str:
    """Returns the shortest times of a plain and of an adaptive layer, whose calls alternate."""
    x = torch.randn(4, 128, 64, device=device, requires_grad=True)
    layers = [each(64, 16, num_heads=4, quantity=128).to(device) for each in (HopfieldLayer, ah.AdaptiveHopfieldLayer)]
    least, begin = [float("inf"), float("inf")], time.perf_counter()
    while time.perf_counter() < begin + seconds:
        for index, layer in enumerate(layers):
            start = time.perf_counter()
            loss = layer(x).sum()
            loss.backward()
            loss.item()  # waits for a GPU
            least[index] = min(least[index], 1e3 * (time.perf_counter() - start))
    times = f"plain {least[0]:.2f} ms, adaptive {least[1]:.2f} ms ({least[1] / least[0]:.2f})"
    return f"HopfieldLayer, 4 heads of 16, 128 patterns, 4 x 128 tokens, forward and backward on {device}: {times}"


def _device(backend: str) -> str:
    """Returns the device on which a backend is tested: plain PyTorch on an Apple GPU, if there is one."""
    if backend == "cuda" and torch.cuda.is_available():
        return "cuda"
    return "mps" if backend == "chunked" and torch.backends.mps.is_available() else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if an available backend fails or computes wrong scores, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m ahop_layers",
        description="Print versions, devices and backends, compare each available backend with the reference, and time"
        " a plain and an adaptive layer. The exit status is 1 if a backend fails or computes wrong scores.",
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
    if not wrong:
        print("\n" + cost_of_switching("cuda" if torch.cuda.is_available() else _device("chunked")))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
