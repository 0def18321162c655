"""Tell malignant from benign tumours by similar cases, beside scikit-learn's own classifiers.

To run: python examples/tabular.py

The breast cancer data ships with scikit-learn. Every model sees the same five folds; the table shows the mean accuracy
and area under the ROC curve on the rows left out. The picture explains three predictions: the row, the stored cases
that answered, and how much each weighed. Writes out/tabular/cases.png.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_validate, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ahop_layers.tabular import AdaptiveMemoryClassifier
from examples.common.outputs import output_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def models(seed: int, epochs: int) -> dict[str, object]:
    """The classifiers to compare, by name."""
    memory = {
        "n_cases": 64,
        "knots": None,
        "dropout": 0.5,
        "batch_size": 64,
        "max_epochs": epochs,
        "random_state": seed,
    }
    return {
        "adaptive memory": AdaptiveMemoryClassifier(**memory),
        "dot-product memory": AdaptiveMemoryClassifier(similarity="dot", **memory),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
        "nearest neighbours": make_pipeline(StandardScaler(), KNeighborsClassifier()),
        "random forest": RandomForestClassifier(random_state=seed),
        "gradient boosting": GradientBoostingClassifier(random_state=seed),
    }


def compare(X: np.ndarray, y: np.ndarray, seed: int, epochs: int) -> None:
    """Print the table."""
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    print(f"{'model':<22}{'accuracy':>10}{'ROC-AUC':>10}{'seconds':>10}")
    for name, model in models(seed, epochs).items():
        start = time.perf_counter()
        scores = cross_validate(model, X, y, cv=folds, scoring=("accuracy", "roc_auc"))
        accuracy, area = scores["test_accuracy"].mean(), scores["test_roc_auc"].mean()
        print(f"{name:<22}{accuracy:>10.3f}{area:>10.3f}{time.perf_counter() - start:>10.1f}", flush=True)


def explain(X: np.ndarray, y: np.ndarray, names: np.ndarray, seed: int, epochs: int, path: Path) -> None:
    """Draw the cases behind a sure benign, an unsure and a sure malignant prediction."""
    rows, others, targets, truth = train_test_split(X, y, stratify=y, random_state=seed)
    model = models(seed, epochs)["adaptive memory"].fit(rows, targets)
    probability = model.predict_proba(others)[:, 1]
    shown = [probability.argmax(), np.abs(probability - 0.5).argmin(), probability.argmin()]
    cases, weights = model.nearest_cases(others[shown])
    centre, spread = rows.mean(0), rows.std(0)

    figure, axes = plt.subplots(3, 1, figsize=(12, 7), sharex=True, layout="constrained")
    for axis, place, answers, shares in zip(axes, shown, cases, weights, strict=True):
        table = np.vstack([others[place], model.cases_[answers]])
        image = axis.imshow((table - centre) / spread, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
        labels = [f"row: {names[truth[place]]}, P(benign) {probability[place]:.2f}"]
        labels += [
            f"case: {names[label]}, weight {share:.2f}"
            for label, share in zip(model.case_targets_[answers], shares, strict=True)
        ]
        axis.set_yticks(range(len(labels)), labels)
        axis.axhline(0.5, color="black")
    axes[-1].set_xticks(range(X.shape[1]), load_breast_cancer().feature_names, rotation=90)
    figure.colorbar(image, ax=axes, label="deviations from the mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the comparison and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes of the memories over the rows (30)")
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it (0)")
    parser.add_argument("--out", type=output_folder, default="out/tabular", help="folder for the picture (out/tabular)")
    arguments = parser.parse_args()

    data = load_breast_cancer()
    print(f"{len(data.data)} tumours, {data.data.shape[1]} features, 5-fold cross-validation\n")
    compare(data.data, data.target, arguments.seed, arguments.epochs)
    path = arguments.out / "cases.png"
    explain(data.data, data.target, data.target_names, arguments.seed, arguments.epochs, path)
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
