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
from ahop_layers.memory import repair
from benchmarks.damages import Wrong, sensor_faults
from tests.samples import refuses, repeated_in_threads, unchanged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_fit")]
V = ah.variants
DIM = 24


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def correlated(count, dim=DIM):
    """Rows that four hidden numbers determine, with a little noise; the first column is constant."""
    mixing = torch.randn(4, dim, generator=seeded(9))
    rows = torch.randn(count, 4, generator=seeded(1)) @ mixing + 0.1 * torch.randn(count, dim, generator=seeded(2))
    rows[:, 0] = 2.0
    return rows


ROWS, CLEAN = correlated(330).split([300, 30])
QUERY = V.Replaced(0.3).bind(ROWS)(CLEAN, seeded())


@pytest.fixture(scope="module")
def fit():
    """A memory of ROWS and the report of its fit. With the few queries of other fits, errors would depend on them."""
    memory = ah.AssociativeMemory(ROWS)
    return memory, memory.fit()


@pytest.fixture
def memory(fit):
    """A fitted memory of ROWS, a copy for each test."""
    return copy.deepcopy(fit[0])


def fitted(rows):
    memory = ah.AssociativeMemory(rows, "l1")  # whose fit is short
    memory.fit()
    return memory


FAULTS = {"swapped": 0.8, "stuck": 0.5, "saturated": 0.05, "spikes": 0.03, "faults": 0.05, "missing": 0.2}


@pytest.mark.parametrize(("kind", "left"), [("replaced", 0.3), *FAULTS.items()])
def test_damaged_rows_come_nearer_to_the_truth(memory, fit, kind, left):
    query = QUERY if kind == "replaced" else Wrong(0.3, sensor_faults(ROWS)[kind])(CLEAN, seeded())
    values, intact = memory.repair(query)
    filled, wrong = torch.where(query.isnan(), ROWS.mean(0), query), query != CLEAN
    assert (values - CLEAN).square().sum() < left * (filled - CLEAN).square().sum()
    assert intact[~wrong].mean() > intact[wrong].mean() + 0.05
    assert (intact[query.isnan()] == 0).all()
    assert "repair leaves 0." in str(fit[1])


def test_a_row_without_suspicion_keeps_its_values_and_unknown_ones_are_filled(memory):
    assert torch.equal(memory.repair(CLEAN).values, CLEAN)
    known = torch.arange(DIM) != 3
    values = memory.repair(CLEAN.where(known, torch.nan)).values
    assert torch.equal(values[:, known], CLEAN[:, known])
    assert (values - CLEAN)[:, 3].abs().mean() < 0.3 * CLEAN[:, 3].std()


@pytest.mark.parametrize("value", [1e4, -1e30])
def test_a_value_far_from_the_patterns_is_wrong_whatever_it_is(memory, value):
    values, intact = memory.repair(CLEAN.where(torch.arange(DIM) != 5, value))
    assert (intact[:, 5] == 0).all()
    assert (intact[:, 6:] > 0.5).double().mean() > 0.8
    assert (values - CLEAN)[:, 5].abs().mean() < 0.5 * CLEAN[:, 5].std()


def test_shapes_and_kinds_of_queries_are_kept(memory):
    expected, probabilities = memory.repair(QUERY)
    for x in (QUERY[0], QUERY.reshape(5, 6, DIM), QUERY[:0], QUERY.double(), QUERY.bfloat16(), QUERY.numpy()):
        for found in memory.repair(x):
            assert found.shape == x.shape
            assert type(found) is type(x)
        assert memory.repair(x).values.dtype == x.dtype
    np.testing.assert_allclose(memory.repair(QUERY.numpy()).values, expected.numpy(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.repair(QUERY[4]).intact, probabilities[4], rtol=1e-3, atol=1e-4)
    for moved, wide in ((copy.deepcopy(memory).double(), torch.float64), (memory.half(), torch.float32)):
        assert moved.state_dict()["mixture.spread"].dtype == wide
        assert (moved.repair(QUERY).values - expected).abs().median() < 0.01


def test_data_frames_bytes_images_and_unknown_patterns():
    pandas, rows = pytest.importorskip("pandas"), correlated(150, 16)
    names = [f"c{number}" for number in range(16)]
    memory = fitted(pandas.DataFrame(rows[:120].numpy(), columns=names))
    query = V.Replaced(0.3).bind(rows)(rows[120:], seeded())
    found = memory.repair(pandas.DataFrame(query.numpy(), columns=names)[names[::-1]])
    np.testing.assert_allclose(found.values, memory.repair(query).values.flip(1).numpy(), rtol=1e-4, atol=1e-4)

    def as_bytes(x):
        return (x * 10 + 128).round().clamp(0, 255).to(torch.uint8)

    values, intact = fitted(as_bytes(rows[:120])).repair(as_bytes(query))
    assert values.dtype == torch.uint8
    assert intact.dtype == torch.float32
    before, after = ((x.float() - as_bytes(rows[120:])).square().sum() for x in (as_bytes(query), values))
    assert after < 0.6 * before
    unknown = rows.masked_fill(torch.rand(rows.shape, generator=seeded()) < 0.1, torch.nan)
    assert fitted(unknown[:120]).repair(unknown[120:]).values.isfinite().all()
    assert fitted(rows[:120].reshape(-1, 4, 4)).repair(rows[120:].reshape(-1, 4, 4)).values.shape == (30, 4, 4)


def test_chunks_and_a_long_shortlist_do_not_change_the_result(memory, monkeypatch):
    whole = memory.repair(QUERY)
    monkeypatch.setattr(repair, "CHUNK_NEAR", 32 * DIM * 7)
    for first, second in zip(memory.repair(QUERY), whole, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    pytest.importorskip("faiss")
    torch.testing.assert_close(ah.Repair(memory, 299)(QUERY), whole.values, rtol=1e-3, atol=1e-3)
    refuses("shortlist must be at least k = 32, got 9", memory.repair, QUERY, 9)


def test_gradients_reach_the_query_and_the_network_also_under_autocast(memory):
    query = QUERY.where(torch.arange(DIM) != 1, torch.nan).requires_grad_()
    network = nn.Sequential(ah.Repair(memory), nn.Linear(DIM, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert network[0](query).dtype == torch.float32
        network(query).float().square().sum().backward()
    assert network[1].weight.grad.abs().sum() > 0
    assert query.grad.isfinite().all()
    assert query.grad[:, 2:].abs().sum() > 0
    assert query.grad[:, 1].abs().sum() == 0


@pytest.mark.parametrize("gate", [*(pytest.param(each, marks=pytest.mark.full) for each in (1, 2)), repair.WEIGHED])
def test_a_compiled_graph_repairs_alike(memory, gate):
    memory.load_state_dict({"mixture.gate": torch.tensor(gate)}, strict=False)
    query, layer = QUERY.where(torch.arange(DIM) != 1, torch.nan), ah.Repair(memory)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query), layer(query), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("labels", "by", "gate"),
    [
        ("none", None, repair.OPEN),
        ("pairs", None, repair.WEIGHED),
        ("pairs", "pattern", repair.OPEN),
        ("one class", None, repair.WEIGHED),
        ("a class each", None, repair.WEIGHED),
    ],
)
def test_another_pattern_of_the_class_is_as_good_as_the_pattern_itself(monkeypatch, labels, by, gate):
    rows, number = ROWS[:64].clone(), torch.arange(64)
    rows[:, 0] = number / 64
    classes = {"none": None, "pairs": number // 2, "one class": 0 * number, "a class each": number}[labels]
    memory = ah.AssociativeMemory(rows, "l1", labels=classes)

    def mix(stored, query, logits, indices, mixture):
        own = (query[:, 0] * 64).round().long().clamp(0, 63)
        if not (query[:, 1:] == 40.0).all():  # clean rows, and rows with few wrong values
            return rows[own], torch.ones_like(query)
        second = own if labels in ("one class", "a class each") else own ^ 1  # itself, or the other of the pair
        of = {repair.CLOSED: query, repair.OPEN: rows[(own + 2) % 64], repair.WEIGHED: rows[second]}
        return of[mixture.gate], torch.ones_like(query)

    monkeypatch.setattr(repair, "mix", mix)
    memory.fit(lambda x, generator: torch.cat([x[:, :1], torch.full_like(x[:, 1:], 40.0)], 1), by=by)
    assert memory._state.fitted.mixture.gate == gate


def test_where_repair_does_not_pay_only_unknown_values_change(memory):
    report = memory.fit(V.Noisy(std=1e-3))  # nothing is suspicious, so nothing improves
    assert report.repair == 1
    assert "repair fills unknown values only" in str(report)
    known = torch.arange(DIM) != 2
    values, intact = memory.repair(QUERY.where(known, torch.nan))
    assert torch.equal(values[:, known], QUERY[:, known])
    assert values[:, 2].isfinite().all()
    assert (intact < 0.5).any()


def test_a_checkpoint_a_file_and_a_copy_repair_alike(memory, tmp_path):
    model = nn.Sequential(ah.Repair(memory), nn.Linear(DIM, 3))
    other = nn.Sequential(ah.Repair(ah.AssociativeMemory(torch.zeros(2, DIM))), nn.Linear(DIM, 3))
    refuses("repair needs a fit", other, QUERY)
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "last.ckpt")
    other.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    assert torch.equal(other(QUERY), model(QUERY))
    memory.save(tmp_path / "memory")
    for each in (ah.AssociativeMemory.load(tmp_path / "memory"), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(each.repair(QUERY).values, memory.repair(QUERY).values)
    state = model.state_dict() | {"0.memory.mixture.spread": torch.full((DIM,), torch.nan)}
    with unchanged(other):
        refuses("spread must be finite", other.load_state_dict, state)


def test_threads_repair_while_another_fits():
    memory = fitted(ROWS)

    def call(_):
        assert (memory.repair(CLEAN).values - CLEAN).abs().mean() < 0.1

    with repeated_in_threads(call, 2):
        memory.fit(V.Replaced(0.3))


def test_what_cannot_be_repaired_is_refused(memory):
    refuses(f"repair needs a fit of at least {repair.FEWEST} patterns", ah.AssociativeMemory(CLEAN).repair, CLEAN)
    small = ah.AssociativeMemory(CLEAN[: repair.FEWEST - 1])
    assert small.fit().repair is None
    refuses("repair needs a fit", small.repair, CLEAN)
    refuses(r"queries x must be \(\.\.\., d\)", memory.repair, CLEAN[:, 1:])
    refuses("memory must be an AssociativeMemory, got Linear", ah.Repair, nn.Linear(2, 2))
    with unchanged(memory):
        refuses("damage must return finite values", memory.fit, lambda x: x / 0)
    memory._state = replace(memory._state, stored=replace(memory._state.stored, shards=SimpleNamespace(count=300)))
    refuses("repair must be called before shard_", memory.repair, CLEAN)
