"""The retrieval benchmark: the Bayes limit, the quick version, resumed runs, the paper's tables, the ablations."""

import re
import sys
from dataclasses import replace
from itertools import combinations
from math import comb, log

import pytest
import torch

from ahop_layers.errors import AHopError
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.variants import Mixed
from benchmarks.harness.rows import read, write
from benchmarks.paper.figures import MULTIMODAL, RETRIEVAL
from benchmarks.paper.networks import NETWORKS, Network
from benchmarks.paper.retrieval import __main__ as program
from benchmarks.paper.retrieval import accuracy, multimodal
from benchmarks.paper.retrieval import measure as retrieval
from benchmarks.paper.retrieval.accuracy import bayes_accuracy, most_likely, retrieval_accuracy, retrieval_error
from benchmarks.paper.retrieval.measure import QUICK, Size, measurements
from benchmarks.paper.retrieval.systems import (
    SYSTEMS,
    AblatedSimilarity,
    ReferenceSimilarity,
    System,
    digit_pairs,
    synthetic,
)
from benchmarks.paper.training import train

pytestmark = pytest.mark.slow


def brute_force(variant, query, origin, bias_known):
    """log p(query | origin) as a sum over every mask and every choice of signs."""
    d, count = len(query), int(variant.mask * len(query))
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=query.dtype)] * d)
    shifts = [variant.shift(query)] if bias_known else list(variant.bias * signs)
    total = 0.0
    for shift in shifts:
        value = query - shift
        kept = torch.distributions.Normal(origin, variant.noise**0.5).log_prob(value).exp()
        for masked in combinations(range(d), count):
            inside = torch.tensor([i in masked for i in range(d)])
            total += torch.where(inside, 0.5 * (value.abs() <= 1), kept).prod().item()
    return log(total / comb(d, count) / len(shifts))


@pytest.mark.parametrize("bias_known", [True, False])
@pytest.mark.parametrize(("mask", "noise", "bias"), [(0.4, 0.3, 0.5), (0.0, 0.3, 0.5), (1.0, 0.3, 0.0)])
def test_the_likelihood_equals_brute_force(mask, noise, bias, bias_known):
    variant, patterns = Mixed(mask, noise, bias, seed=3), synthetic(4, 5, 0).double()
    index, query = variant.sample(patterns, 6)
    for row, origin in zip(query, patterns[index], strict=True):
        exact = brute_force(variant, row, origin, bias_known)
        found = accuracy.log_likelihood(variant, row, origin, bias_known=bias_known)
        assert found.item() == pytest.approx(exact, abs=1e-9)
    every = accuracy.log_likelihood(variant, query[:, None], patterns[None], bias_known=bias_known)
    assert torch.equal(most_likely(variant, query, patterns, bias_known=bias_known), every.argmax(-1))
    query = torch.tensor([[1.0, 3.0], [1.0, -0.5]])  # the second is outside of the range of the replaced values
    inside, outside = accuracy.log_likelihood(Mixed(1.0, low=0.0, high=4.0), query, torch.zeros(2)).exp()
    assert (inside.item(), outside.item()) == (pytest.approx(1 / 16), 0)


def test_the_bayes_limit_of_a_known_and_a_guessed_bias_and_without_noise():
    variant, patterns = Mixed(0.4, 0.4, 0.6), synthetic(100, 24, 0)
    known, guessed = (
        bayes_accuracy(variant, patterns, 500, torch.Generator().manual_seed(1), bias_known=known)
        for known in (True, False)
    )
    assert known > guessed + 0.1
    for variant in (Mixed(), Mixed(0.25), Mixed(0.25, low=0.0, high=4.0), Mixed(bias=0.7), Mixed(0.5, bias=0.5)):
        assert bayes_accuracy(variant, patterns, 200) == 1.0
    for name in ("mask", "noise", "bias"):
        with pytest.raises(AHopError, match=rf"{name} must be a number for a likelihood, got the range \(0.1, 0.2\)"):
            bayes_accuracy(Mixed(**{name: (0.1, 0.2)}), patterns)


def test_accuracy_is_that_of_the_retrieved_pattern():
    """The scores of this memory identify each pattern, but it retrieves a mean, which is nearest to the third one."""
    patterns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.4, 0.4]])
    memory = Network(patterns, lambda query, key: 0.01 * query @ key.T)
    index = torch.tensor([0, 1])
    assert torch.equal(memory.recall(patterns[:2]), index)
    assert retrieval_accuracy(memory, index, patterns[:2]) == 0.0
    assert retrieval_accuracy(memory, torch.tensor([2, 2]), patterns[:2]) == 1.0
    patterns, index = torch.eye(4), torch.tensor([0, 1, 2, 2])
    memory = Network(patterns, separation="argmax")
    assert retrieval_accuracy(memory, index, patterns) == 0.75
    assert retrieval_error(memory, index, patterns) == pytest.approx(2 / 4 / 4)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a reduced quick version in this process and returns its output."""
    one = retrieval.Budget(1, 8)
    size = {"synthetic": retrieval.Budget(25, 32), "figure": one, "ablations": one, "timing": one, "timed": ((8, 48),)}
    monkeypatch.setattr(program, "QUICK", QUICK._replace(**size, patterns=(48,), queries=100, concepts=(48,)))
    torch.set_num_threads(1)  # more threads slow such small steps down

    def main(*options):
        command = ["retrieval", "--quick", "--device", "cpu", "--output", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        program.main()
        return capsys.readouterr().out

    return main


def check_resumes(path, run, table, lost):
    """Of some lost rows and an altered one, only the lost ones are measured again."""
    rows = read(path)
    rows[0]["accuracy"] = "0.123"
    write(path, rows[:-lost])
    assert "0.123" in run("--table", table)
    assert [row["accuracy"] for row in read(path)] == [row["accuracy"] for row in rows]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.full
def test_the_quick_version_resumes(tmp_path, run):
    first, rows = run("--table", "accuracy"), read(tmp_path / "retrieval_quick.csv")
    assert len(rows) == len(measurements("accuracy", QUICK, images=False))
    found = {row["system"]: float(row["accuracy"]) for row in rows if row["noise"] == "0.4"}
    assert found["M-Hop"] < found["A-Hop, debias"] <= found["Bayes limit"]
    assert found["Bayes limit, bias guessed"] < found["Bayes limit"]
    for system in found:
        assert re.search(rf"^\| {re.escape(system)} \| \*{{0,2}}\d\.\d+", first, flags=re.MULTILINE)
    check_resumes(tmp_path / "retrieval_quick.csv", run, "accuracy", 2)


@pytest.mark.full
def test_two_phases_resume(tmp_path, run):
    first, rows = run("--table", "multimodal"), read(tmp_path / "multimodal_quick.csv")
    found = {(row["system_1"], row["system_2"]): float(row["accuracy"]) for row in rows}
    assert list(found) == list(MULTIMODAL)
    assert found["M-Hop", "M-Hop"] < found["A-Hop, debias", "A-Hop, debias"]
    for (one, two), value in found.items():
        assert re.search(rf"^\| {one} \| {two} \| \*{{0,2}}{value:.3f}\*{{0,2}} \|$", first, flags=re.MULTILINE)
    check_resumes(tmp_path / "multimodal_quick.csv", run, "multimodal", 1)


@pytest.mark.parametrize("damaged", ["", "mask_1", "mask_2"])
def test_a_query_is_right_if_both_phases_are(damaged, monkeypatch):
    nearest = System(lambda patterns: Network(patterns, "dis", "argmax"))
    monkeypatch.setitem(multimodal.MEMORIES, "M-Hop", nearest)
    clean = dict.fromkeys(("mask_1", "noise_1", "bias_1", "mask_2", "noise_2", "bias_2"), 0.0)
    pair = replace(multimodal.measurements(QUICK)[0], **clean)
    assert (pair.system_1, pair.system_2) == ("M-Hop", "M-Hop")
    pair = replace(pair, **{damaged: 1.0}) if damaged else pair
    found = list(multimodal.accuracies([pair], 100, torch.device("cpu")))
    assert found[0] < 0.5 if damaged else found == [1.0]


@pytest.mark.parametrize("count", [898, 1024])
def test_the_sides_of_a_concept_are_different_digits(count):
    sides = digit_pairs(count, run=0)
    assert all(side.shape == (count, 64) and len(side.unique(dim=0)) == count for side in sides)
    assert not (sides[0] == sides[1]).all(-1).any()
    assert not torch.equal(digit_pairs(count, run=1)[0], sides[0])


def test_the_tables_are_those_of_the_paper():
    """Twelve mixtures by two sizes, four columns of accuracy, five runs, every ablation, five pairs by four sizes."""
    tables = {name: measurements(name, Size(), images=True) for name in ("figure", "accuracy", "ablations")}
    assert len({(each.patterns, each.mask, each.noise, each.bias) for each in tables["figure"]}) == 2 * 12
    assert len({(each.data, each.noise, each.run) for each in tables["accuracy"]}) == 4 * 5
    assert {each.system for table in ("accuracy", "ablations") for each in tables[table]} >= set(RETRIEVAL)
    pairs = multimodal.measurements(Size())
    assert len({(each.concepts, each.system_1, each.system_2, each.run) for each in pairs}) == len(pairs) == 4 * 5 * 5


@pytest.mark.parametrize("matrix", ["triangle", "identity", "random"])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_ablation_is_initialized_to_the_dot_product(matrix, in_order):
    patterns, query = synthetic(20, 12, 0), torch.randn(5, 12)
    similarity = AblatedSimilarity(patterns, matrix=matrix, in_order=in_order)
    torch.testing.assert_close(similarity(query, patterns), query @ patterns.T, atol=1e-4, rtol=1e-4)
    if not in_order:  # unsorted scores rank as weighted distances and products
        torch.nn.init.normal_(similarity.w)
        distance, product = similarity.w @ similarity.matrix
        per_dimension = -distance * (query[:, None] - patterns).square() + product * query[:, None] * patterns
        difference = similarity(query, patterns) - per_dimension.sum(-1)
        torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), atol=1e-4, rtol=1e-4)


def test_timing_compares_with_the_reference_which_trains_equally(tmp_path, run):
    assert "fit, speedup" in run("--table", "timing")
    rows = read(tmp_path / "retrieval_timing_quick.csv")
    assert {row["system"] for row in rows} >= {"A-Hop, debias", "unsorted, U", "reference, CPU"}
    assert all(float(row["train_ms"]) > 0 and float(row["recall_ms"]) > 0 for row in rows)
    ours, plain = (NETWORKS["A-Hop, debias"](synthetic(30, 8, 0)) for _ in range(2))
    plain.similarity = ReferenceSimilarity(8, debias=True)
    losses, expected = (train(network, Mixed(0.3, 0.2, 0.3), 10, batch=32) for network in (ours, plain))
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)


def test_fixed_samples_are_those_of_a_run(monkeypatch):
    data = []
    monkeypatch.setattr(AssociativeMemory, "fit", lambda memory, pairs, **options: data.append((*pairs, options)))
    for run in (0, 0, 1):
        SYSTEMS["dis, dot, 512 samples"].fitted(synthetic(30, 8, 0), Mixed(0.3, 0.2, 0.3), steps=0, batch=0, run=run)
    (index, query, options), again, other = data
    assert query.shape == (512, 8)
    assert options == {"seed": 0}
    assert torch.equal(query, again[1])
    assert not torch.equal(index, other[0])
