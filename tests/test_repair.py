"""Repair of wrong and unknown values: what changes, what does not, gradients, files, and what is refused."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.memory.learn import questions
from ahop_layers.memory.repair import CHUNK_NEAR, FEWEST
from tests.samples import refuses, unchanged

V = ah.variants


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def correlated(count, dim=24, hidden=4):
    """Rows that a few hidden numbers determine, with a little noise; the first column is constant."""
    mixing = torch.randn(hidden, dim, generator=seeded(9))
    rows = torch.randn(count, hidden, generator=seeded(1)) @ mixing + 0.1 * torch.randn(count, dim, generator=seeded(2))
    rows[:, 0] = 2.0
    return rows


def fitted(rows, patch, **options):
    memory = ah.AssociativeMemory(rows, **options)
    for name in ("QUERIES", "MOST_QUERIES"):
        patch.setattr(questions, name, 128)
    return memory, memory.fit()


@pytest.fixture(scope="module")
def case():
    """A memory, and clean rows that it does not store."""
    rows = correlated(330)
    with pytest.MonkeyPatch.context() as patch:
        memory, report = fitted(rows[:300], patch)
    return memory, rows[300:], report


@pytest.mark.parametrize(("kind", "left"), [
    (V.Replaced, 0.25), (V.Swapped, 0.6), (V.Spiked, 0.01), (V.Saturated, 0.05), (V.Missing, 0.1),
])  # fmt: skip
def test_damaged_rows_come_nearer_to_the_truth(case, kind, left):
    memory, clean, report = case
    assert "repair leaves 0." in str(report)
    query = kind(0.3).bind(memory.patterns)(clean, seeded())
    values, intact = memory.repair(query)
    filled = torch.where(query.isnan(), memory.patterns.mean(0), query)
    assert (values - clean).square().sum() < left * (filled - clean).square().sum()
    wrong = query != clean
    assert intact[~wrong].mean() > intact[wrong].mean() + 0.3
    assert (intact[query.isnan()] == 0).all()
    if kind in (V.Spiked, V.Saturated):
        assert (intact < 0.5)[wrong].double().mean() > 0.9


def test_probabilities_are_calibrated(case):
    memory, clean, _ = case
    clean = clean.repeat(8, 1)
    query = V.Replaced(0.4).bind(memory.patterns)(clean, seeded())
    intact, right = memory.repair(query).intact, query == clean
    bins = (intact * 5).long().clamp(max=4)
    errors = [(bins == each).double().mean() * (intact - right.float())[bins == each].mean().abs() for each in range(5)]
    assert sum(error for error in errors if error == error) < 0.1


def test_an_intact_row_is_unchanged_and_unknown_values_alone_are_filled(case):
    memory, clean, _ = case
    values = memory.repair(clean).values
    assert (values == clean).all(-1).double().mean() > 0.9
    query = clean.clone()
    query[:, 3] = torch.nan
    values = memory.repair(query).values
    assert values.isfinite().all()
    same = torch.arange(24) != 3
    assert (values == clean)[:, same].all(-1).double().mean() > 0.9
    assert (values - clean)[:, 3].abs().mean() < 0.2 * clean[:, 3].std()


def test_shape_and_dtype_are_kept(case):
    memory, clean, _ = case
    expected, intact = memory.repair(clean)
    for x in (clean[0], clean.reshape(5, 6, 24), clean[:0], clean.double(), clean.bfloat16(), clean.numpy()):
        found = memory.repair(x)
        for each in found:
            assert each.shape == x.shape
            assert type(each) is type(x)
        assert found.values.dtype == x.dtype
    np.testing.assert_array_equal(memory.repair(clean.numpy()).values, expected.numpy())
    torch.testing.assert_close(memory.repair(clean[4]).intact, intact[4], rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.repair(clean).values.dtype == torch.float32
    half = copy.deepcopy(memory).half()
    assert half.mixture.factors.dtype == torch.float32
    assert half.repair(clean.half()).values.dtype == torch.float16


def test_chunks_of_queries_do_not_change_the_result(case, monkeypatch):
    memory, clean, _ = case
    query = V.Replaced(0.3).bind(memory.patterns)(clean, seeded())
    whole = memory.repair(query)
    monkeypatch.setattr("ahop_layers.memory.repair.CHUNK_NEAR", 32 * 24 * 7)
    assert CHUNK_NEAR > 32 * 24 * 7
    for first, second in zip(whole, memory.repair(query), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_query_and_the_network(case):
    memory, clean, _ = case
    query = V.Replaced(0.3).bind(memory.patterns)(clean, seeded())
    query[:, 1] = torch.nan
    query.requires_grad_()
    network = nn.Sequential(ah.Repair(memory), nn.Linear(24, 3))
    network(query).square().sum().backward()
    assert network[1].weight.grad.abs().sum() > 0
    gradient = query.grad[:, 2:]
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_a_state_dict_a_file_and_a_copy_repair_alike(case, tmp_path):
    memory, clean, _ = case
    query = V.Replaced(0.5).bind(memory.patterns)(clean, seeded())
    model = nn.Sequential(ah.Repair(memory), nn.Linear(24, 3))
    other = nn.Sequential(ah.Repair(ah.AssociativeMemory(torch.zeros(2, 24))), nn.Linear(24, 3))
    refuses("repair needs a fit", other, query)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(query), model(query))
    memory.save(tmp_path / "memory")
    for each in (
        ah.AssociativeMemory.load(tmp_path / "memory"),
        copy.deepcopy(memory),
        pickle.loads(pickle.dumps(memory)),
    ):
        assert torch.equal(each.repair(query).values, memory.repair(query).values)
    state = model.state_dict() | {"0.memory.mixture.factors": torch.full((16, 24), torch.nan)}
    with unchanged(other):
        refuses("factors must be finite", other.load_state_dict, state)


def test_where_repair_does_not_pay_only_unknown_values_change(monkeypatch):
    rows = correlated(120)
    monkeypatch.setattr("ahop_layers.memory.repair.LESS_ERROR", 0.0)  # which no repair reaches
    memory, report = fitted(rows[:100], monkeypatch)
    query = V.Spiked(0.2).bind(rows)(rows[100:], seeded())
    query[:, 0] = torch.nan
    values = memory.repair(query).values
    assert torch.equal(values[:, 1:], query[:, 1:])
    assert values[:, 0].isfinite().all()
    assert "repair changes unknown values only" in str(report)


def test_images_bytes_and_unknown_patterns_are_repaired(monkeypatch):
    rows = correlated(150, 16)
    bytes_ = (rows * 20 + 128).clamp(0, 255).to(torch.uint8)
    memory, _ = fitted(bytes_[:120], monkeypatch)
    found = memory.repair(bytes_[120:])
    assert found.values.dtype == torch.uint8
    assert found.intact.is_floating_point()
    unknown = rows.clone()
    unknown[torch.rand(rows.shape, generator=seeded()) < 0.1] = torch.nan
    memory, _ = fitted(unknown[:120], monkeypatch)
    assert memory.repair(unknown[120:]).values.isfinite().all()
    memory, _ = fitted(rows[:120].reshape(-1, 4, 4), monkeypatch)
    assert memory.repair(rows[120:].reshape(-1, 4, 4)).values.shape == (30, 4, 4)


def test_what_cannot_be_repaired_is_refused(case, monkeypatch):
    memory, clean, _ = case
    refuses(f"repair needs a fit of at least {FEWEST} patterns", ah.AssociativeMemory(clean).repair, clean)
    small, report = fitted(clean[: FEWEST - 1], monkeypatch)
    assert report.repair == ""
    refuses("repair needs a fit", small.repair, clean)
    refuses(r"queries x must be \(\.\.\., d\)", memory.repair, clean[:, 1:])
    refuses("memory must be an AssociativeMemory, got Linear", ah.Repair, nn.Linear(2, 2))
    sharded = copy.deepcopy(memory)
    sharded._stored = replace(memory._stored, shards=SimpleNamespace(count=300))
    refuses("repair must be called before shard_", sharded.repair, clean)


def test_a_failed_fit_leaves_the_repair_unchanged(case):
    memory = copy.deepcopy(case[0])
    with unchanged(memory):
        refuses("damage must return finite values", memory.fit, lambda x: x / 0)
