"""Draw docs/kernels.png from benchmarks/results/kernels.csv: how many times faster, and with how much less memory.

To run: python -m benchmarks.plot
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]


def draw(rows: list[dict[str, str]], target: Path) -> None:
    """One panel a device: bars of the ratio to the reference as the paper writes it, forward and with backward."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure, axes = plt.subplots(1, len(devices), figsize=(6.5 * len(devices), 6), layout="constrained", squeeze=False)
    for axis, device in zip(axes[0], devices, strict=True):
        mine = [row for row in rows if row["device"] == device]
        cases = list(dict.fromkeys(row["case"] for row in mine))
        for offset, label, colour in ((-0.2, "forward", "#2a7f9e"), (0.2, "forward + backward", "#d98032")):
            ratios = [float(row["paper/ours"]) for row in mine if row["pass"] == label]
            places = [place + offset for place in range(len(cases))]
            bars = axis.barh(places, ratios, height=0.38, color=colour, label=label)
            axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set(xscale="log", title=device, xlabel="times faster than plain PyTorch (sort, cumulative sum, product)")
        axis.axvline(1, color="0.5", linewidth=1)
        axis.set_yticks(range(len(cases)), cases, fontsize=8)
        axis.set_xlim(right=4 * max(float(row["paper/ours"]) for row in mine))
        axis.invert_yaxis()
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=130, facecolor="white")
    plt.close(figure)


def main() -> None:
    """Read the rows and draw them."""
    with (ROOT / "benchmarks" / "results" / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    target = ROOT / "docs" / "kernels.png"
    draw(rows, target)
    print(f"picture: {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
