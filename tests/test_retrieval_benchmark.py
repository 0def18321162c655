"""The retrieval benchmark: the likelihood of the Bayes limit, and a small run of each table."""

import re
import sys
from itertools import combinations
from math import comb, log

import pytest
import torch

from ahop_layers.memory.variants import Mixed
from benchmarks.harness.rows import read
from benchmarks.paper.networks import NETWORKS
from benchmarks.paper.retrieval import __main__ as program
from benchmarks.paper.retrieval import accuracy
from benchmarks.paper.retrieval import measure as retrieval
from benchmarks.paper.retrieval.accuracy import most_likely
from benchmarks.paper.retrieval.measure import QUICK
from benchmarks.paper.retrieval.systems import ReferenceSimilarity, synthetic
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


@pytest.mark.full
def test_the_quick_version(tmp_path, run):
    shown, rows = run("--table", "accuracy"), read(tmp_path / "retrieval_quick.csv")
    found = {row["system"]: float(row["accuracy"]) for row in rows if row["noise"] == "0.4"}
    assert found["M-Hop"] < found["A-Hop, debias"] <= found["Bayes limit"]
    assert found["Bayes limit, bias guessed"] < found["Bayes limit"]
    for system in found:
        assert re.search(rf"^\| {re.escape(system)} \| \*{{0,2}}\d\.\d+", shown, flags=re.MULTILINE)


def test_timing_compares_with_the_reference_which_trains_equally(tmp_path, run):
    assert "fit, speedup" in run("--table", "timing")
    rows = read(tmp_path / "retrieval_timing_quick.csv")
    assert {row["system"] for row in rows} >= {"A-Hop, debias", "unsorted, U", "reference, CPU"}
    assert all(float(row["train_ms"]) > 0 and float(row["recall_ms"]) > 0 for row in rows)
    ours, plain = (NETWORKS["A-Hop, debias"](synthetic(30, 8, 0)) for _ in range(2))
    plain.similarity = ReferenceSimilarity(8, debias=True)
    losses, expected = (train(network, Mixed(0.3, 0.2, 0.3), 10, batch=32) for network in (ours, plain))
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)
