"""One bag of 100,000 instances of 512 features, 8 heads: time and peak memory of the forward and backward pass.

To run: python -m benchmarks.mil_memory [--device cuda]

The memory is the peak beyond what is there before the pass, the instances and the model; it includes the gradients of
all parameters. ``--embed`` puts a linear layer before the pooling, as examples/mil.py does, so that the gradient passes
through every instance.
"""

import argparse
import time

import torch
from torch import nn

from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from benchmarks.harness.memory import in_own_process, peak, reset_peak


def measure(instances: int, features: int, heads: int, embed: int, device: str) -> tuple[float, int]:
    """Seconds and peak bytes of one pass, in this process."""
    torch.manual_seed(0)
    width = embed or features
    layer = nn.Sequential(nn.Linear(features, width), nn.ReLU()) if embed else nn.Identity()
    model = nn.ModuleList([layer, AdaptiveHopfieldPooling(width, num_heads=heads)]).to(device)
    bag = torch.randn(instances, features, device=device)

    def once(bag: torch.Tensor) -> None:
        model[1].pool_packed(model[0](bag), [len(bag)]).sum().backward()
        model.zero_grad()

    once(bag[:8])  # load every kernel before the memory is read
    before, start = reset_peak(device), time.perf_counter()
    once(bag)
    most = peak(device)
    return time.perf_counter() - start, most - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--embed", type=int, default=0, metavar="WIDTH", help="of a layer before the pooling (none)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    seconds, most = in_own_process(measure, *vars(options).values())
    size = f"one bag of {options.instances:,} x {options.features}, {options.heads} heads, {options.device}"
    data = options.instances * options.features * 4
    print(f"{size}: {seconds:.2f} s, {most / 1e9:.2f} GB above the data ({data / 1e9:.2f} GB)")


if __name__ == "__main__":
    main()
