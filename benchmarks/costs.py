"""Time and peak memory of forward and backward of the pooling of one large bag.

To run: python -m benchmarks.costs [--device cuda] [--help]

The memory excludes the instances and the model, and includes the gradients of all parameters. The measurement runs in a
process of its own.
"""

from collections.abc import Sequence

import torch
from torch import nn

import ahop_layers as ah
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import clock, in_own_process, peak, reset_peak

SIZES = {
    "instances": (100_000, "instances of the bag"),
    "features": (512, "features of an instance"),
    "heads": (8, "heads of the pooling"),
    "embed": (0, "width of a linear layer before the pooling, so that every instance gets a gradient; 0 for none"),
}


def pooling_cost(instances: int, features: int, heads: int, embed: int, device: str) -> tuple[float, int]:
    """Returns the seconds and peak bytes of forward and backward of one bag."""
    torch.manual_seed(0)
    width = embed or features
    layer = nn.Sequential(nn.Linear(features, width), nn.ReLU()) if embed else nn.Identity()
    model = nn.ModuleList([layer, ah.AdaptiveHopfieldPooling(width, num_heads=heads, blocks=None)]).to(device)
    bag = torch.randn(instances, features, device=device)

    def forward_and_backward(bag: torch.Tensor) -> None:
        model[1].pool_packed(model[0](bag), [len(bag)]).sum().backward()
        model.zero_grad()

    forward_and_backward(bag[:8])  # loads the kernels
    before, start = reset_peak(device), clock(device)
    forward_and_backward(bag)
    return clock(device) - start, max(0, peak(device) - before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("costs", __doc__)
    for name, (size, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{text} (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args(arguments)
    sizes = [getattr(options, name) for name in SIZES]
    seconds, most = in_own_process(pooling_cost, *sizes, options.device)
    size = f"one bag of {options.instances:,} x {options.features}, {options.heads} heads, {options.device}"
    data = options.instances * options.features * 4
    print(f"{size}: {seconds:.2f} s, {most / 1e9:.2f} GB in addition to the data ({data / 1e9:.2f} GB)")


if __name__ == "__main__":
    main()
