"""What the estimator for tables costs: the time of a fit on Adult, and the memory of predicting 100,000 rows.

To run: python -m benchmarks.tabular_cost [--data-dir DIR] [--epochs 100] [--cases 256] [--device cuda]

All epochs are trained: no early stop. The memory is the peak beyond the rows, the model and the
probabilities.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch

from ahop_layers.tabular import AdaptiveMemoryClassifier
from benchmarks.harness.data import files_needed
from benchmarks.harness.memory import in_own_process, peak, reset_peak
from benchmarks.paper.tabular.data import files_of, load


def fit(folder: Path, epochs: int, cases: int, device: str) -> tuple[float, float]:
    """Seconds of a fit, and its test accuracy."""
    split = load("adult", folder, 0)
    model = AdaptiveMemoryClassifier(cases, max_epochs=epochs, patience=None, random_state=0, device=device)
    start = time.perf_counter()
    model.fit(split.X, split.y)
    return time.perf_counter() - start, model.score(split.test_X, split.test_y)


def predict(folder: Path, epochs: int, cases: int, device: str) -> int:
    """Bytes of a prediction; the model before it is fitted to few rows, whose memory a prediction could use again."""
    split = load("adult", folder, 0, rows=2000)
    model = AdaptiveMemoryClassifier(cases, max_epochs=1, random_state=0, device=device).fit(split.X, split.y)
    rows = np.resize(split.X, (100_000, split.X.shape[1]))
    before = reset_peak(device)
    probabilities = model.predict_proba(rows)
    return peak(device) - before - probabilities.nbytes


def main() -> None:
    """Measure, each in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("AHOP_DATA_DIR", "data")))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--cases", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with files_needed():
        files_of("adult", options.data_dir)
    most = in_own_process(predict, *vars(options).values())
    seconds, accuracy = in_own_process(fit, *vars(options).values())
    size = f"Adult, {options.epochs} epochs, {options.cases} cases, {options.device}, {torch.get_num_threads()} threads"
    print(f"{size}: fit {seconds:.1f} s, test accuracy {accuracy:.4f}; 100,000 rows predicted in {most / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
