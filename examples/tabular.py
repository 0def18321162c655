"""Classify tumors as malignant or benign by similar cases, compared with classifiers of scikit-learn.

To run: python -m examples.tabular

The breast cancer data comes with scikit-learn. All models are evaluated on the same five folds; the table shows mean
accuracy and mean area under the ROC curve of the test folds. All have default settings. The picture explains three
predictions of the adaptive memory: the row, the stored cases with the largest weights, these weights, and the weight of
each feature. Writes cases.png into the folder of --out.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_validate, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ahop_layers.tabular import AdaptiveMemoryClassifier
from examples.common.command import Parser
from examples.common.outputs import answer_style


def make_models(options: argparse.Namespace) -> dict[str, object]:
    """Returns the classifiers to compare, by name."""
    return {
        "adaptive memory": AdaptiveMemoryClassifier(random_state=options.seed),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
        "nearest neighbors": make_pipeline(StandardScaler(), KNeighborsClassifier()),
        "random forest": RandomForestClassifier(random_state=options.seed),
        "gradient boosting": GradientBoostingClassifier(random_state=options.seed),
    }


def compare(X: np.ndarray, y: np.ndarray, options: argparse.Namespace) -> dict[str, float]:
    """Prints the table, and returns the accuracies."""
    folds, found = StratifiedKFold(5, shuffle=True, random_state=options.seed), {}
    print(f"{'model':<22}{'accuracy':>10}{'ROC-AUC':>10}{'seconds':>10}")
    for name, model in make_models(options).items():
        start = time.perf_counter()
        scores = cross_validate(model, X, y, cv=folds, scoring=("accuracy", "roc_auc"))
        found[name], area = scores["test_accuracy"].mean(), scores["test_roc_auc"].mean()
        print(f"{name:<22}{found[name]:>10.3f}{area:>10.3f}{time.perf_counter() - start:>10.1f}", flush=True)
    return found


def explain(X: np.ndarray, y: np.ndarray, names: np.ndarray, options: argparse.Namespace) -> Figure:
    """Draws the cases of a confident benign, an uncertain and a confident malignant prediction."""
    rows, others, targets, truth = train_test_split(X, y, stratify=y, random_state=options.seed)
    model = AdaptiveMemoryClassifier(random_state=options.seed).fit(rows, targets)
    probability = model.predict_proba(others)[:, 1]
    shown = [probability.argmax(), np.abs(probability - 0.5).argmin(), probability.argmin()]
    cases, weights = model.nearest_cases(others[shown])
    center, spread = rows.mean(0), rows.std(0)
    order = model.feature_weights_.argsort()[::-1]

    figure = Figure(figsize=(11, 8), layout="constrained")
    top, *axes = figure.subplots(4, 1, sharex=True, height_ratios=[0.6, 1, 1, 1])
    top.bar(range(X.shape[1]), model.feature_weights_[order], color="gray")
    top.set(ylabel="weight", title="How much a difference of one standard deviation of a feature counts")
    for axis, place, answers, shares in zip(axes, shown, cases, weights, strict=True):
        table = np.vstack([others[place], model.cases_[answers]])
        image = axis.imshow(((table - center) / spread)[:, order], cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
        color, sign = answer_style((probability[place] > 0.5) == truth[place])
        labels = [f"tumor: {names[truth[place]]}, predicted P(benign) {probability[place]:.2f} {sign}"]
        labels += [
            f"case: {names[label]}, weight {share:.3f}"
            for label, share in zip(model.case_targets_[answers], shares, strict=True)
        ]
        axis.set_yticks(range(len(labels)), labels, fontsize="small")
        axis.get_yticklabels()[0].set_color(color)
        axis.axhline(0.5, color="black")
    feature_names = load_breast_cancer().feature_names[order]
    axes[-1].set_xticks(range(X.shape[1]), feature_names, rotation=90, fontsize="small")
    figure.colorbar(image, ax=axes, label="standard deviations from the mean")
    return figure


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    return Parser("tabular", __doc__, ["cases.png"])


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the comparison, draws the picture, and returns the accuracies."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    data = load_breast_cancer()
    with parser.one_line_errors():
        parser.start(options)
        print(f"{len(data.data)} tumors, {data.data.shape[1]} features, 5-fold cross-validation\n")
        found = compare(data.data, data.target, options)
        path = options.out / "cases.png"
        explain(data.data, data.target, data.target_names, options).savefig(path, dpi=100)
        print(f"\npicture: {path}")
    return found


if __name__ == "__main__":
    main()
