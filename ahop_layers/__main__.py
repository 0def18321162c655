"""``python -m ahop_layers``: versions, devices, and which kernels run here, each tried against the reference."""

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import ahop_layers as ah
from ahop_layers.ops import reference

LIBRARIES = ("einops", "triton", "hopfield-layers", "lightning", "scikit-learn", "timm", "transformers")


def installed(name: str) -> str:
    """The version of a library, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def self_test(backend: str, device: str) -> str:
    """Scores of a backend against the reference in float64: its error, that of plain float32, and the time it took."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(rows, 24, generator=generator) for rows in (40, 90))
    weight, bases = torch.rand(2, 24, generator=generator), ("dis", "dot")
    exact = reference.adaptive_similarity(query.double(), key.double(), weight.double(), bases)
    plain = (reference.adaptive_similarity(query, key, weight, bases) - exact).abs().max()
    begin = time.perf_counter()
    there = query.to(device), key.to(device), weight.to(device)
    scores = ah.adaptive_similarity(*there, bases=bases, backend=backend).cpu()
    seconds = time.perf_counter() - begin
    error = (scores - exact).abs().max()
    verdict = "ok" if error <= 2 * plain + 1e-6 else "WRONG"
    return f"{verdict}: error {error:.1e}, that of plain float32 {plain:.1e}, {seconds:.2f} s"


def main() -> int:
    """Print the report; the status tells whether every backend that can run gives right results."""
    print(f"ahop-layers {ah.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join([f"torch {torch.__version__}", *(f"{name} {installed(name)}" for name in LIBRARIES)]))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print("devices: " + ", ".join([f"CPU with {torch.get_num_threads()} threads", *gpus]))
    print(f"Triton's cache: {os.environ.get('TRITON_CACHE_DIR', Path.home() / '.triton' / 'cache')}\n")
    wrong = False
    for name, (available, detail) in ah.backends().items():
        result = ""
        if available:
            try:
                result = self_test(name, "cuda" if name == "triton" and gpus else "cpu")
            except Exception as error:  # whatever fails in a backend is what this report is for
                result = f"FAILED: {type(error).__name__}: {error}"
            wrong |= not result.startswith("ok")
        print(f"{name:9}  {'' if available else 'not here: '}{detail}" + (f"\n{'':9}  {result}" if result else ""))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
