"""Codes and shortlists: what they find, and that they follow what a memory stores."""

import copy
import importlib
import threading

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory import codes as codes_module
from tests.samples import refuses

faiss = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="needs FAISS")


def patterns(count=4000, dim=32):
    """Correlated patterns."""
    random = torch.Generator().manual_seed(3)
    mixing = torch.randn(8, dim, generator=random)
    return torch.randn(count, 8, generator=random) @ mixing / 3 + torch.randn(count, dim, generator=random) / 2


def damaged(stored, share, missing):
    """Every 20th pattern with noise, of whose values a share is replaced or missing, and its index."""
    random = torch.Generator().manual_seed(4)
    index = torch.arange(0, len(stored), 20)
    query = stored[index] + 0.05 * torch.randn(len(index), stored.shape[1], generator=random)
    wrong = torch.rand(query.shape, generator=random) < share
    query[wrong] = torch.nan if missing else 8 * torch.rand(int(wrong.sum()), generator=random) - 4
    return query, index


def found(memory, stored, share=0.5, missing=False, shortlist=200):
    query, index = damaged(stored, share, missing)
    return (memory.recall(query, shortlist) == index).float().mean().item()


@faiss
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("similarity", ["auto", "l1"])
def test_a_shortlist_survives_damage(similarity, missing):
    """Linear scores of the same length find less than a third."""
    stored = patterns()
    memory = ah.AssociativeMemory(stored, similarity)
    assert found(memory, stored, 0.5 if similarity == "auto" or missing else 0.3, missing) > 0.97


@faiss
def test_unknown_values_on_both_sides_are_noise():
    """Patterns with many unknown values must neither attract nor repel queries with many."""
    stored = patterns()
    hidden = (
        torch.rand(stored.shape, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 0.5, 4000)[:, None]
    )
    memory = ah.AssociativeMemory(stored.masked_fill(hidden, torch.nan))
    query, index = damaged(stored, 0.3, missing=True)
    hits = memory.search(query, 1, shortlist=200).indices[:, 0]
    exact = memory.recall(query)
    assert (hits == exact).float().mean() > 0.97
    right = exact == index
    assert (hits[right] == index[right])[-50:].float().mean() > 0.95  # half of the values of these patterns are known


@faiss
@pytest.mark.parametrize("bits", [8, 16])
def test_a_hit_has_its_exact_score_and_ties_are_ordered_by_index(bits):
    stored = patterns(500).round()
    stored[250:] = stored[:250]
    memory = ah.AssociativeMemory(stored)
    memory.build_codes(bits)
    query = stored[:40] + 0.01
    for number in (1, 40):  # a single query divides the patterns among threads
        exact, short = (memory.search(query[:number], 2, each) for each in (None, 60))
        torch.testing.assert_close(short.scores, exact.scores, rtol=1e-5, atol=1e-6)
        assert torch.equal(short.indices, exact.indices)
    assert torch.equal(memory.search(query, 3, 500).indices, memory.search(query, 3).indices)


@faiss
def test_codes_follow_added_replaced_and_removed_patterns():
    stored = patterns(600)
    memory = ah.AssociativeMemory(stored[:300], ids=range(300))
    memory.build_codes()
    before = memory._state
    memory.add(stored[300:599], ids=range(300, 599))
    memory.add(stored[599:], ids=[7], replace=True)
    memory.remove(ids=[0, 1, 550])
    kept = memory._state.codes
    assert torch.equal(kept.packed, kept.encode(memory.patterns))
    query = memory.patterns + 0.01
    assert (memory.recall(query, 20) == torch.arange(596)).all()
    assert len(before.codes.packed) == 300


@faiss
def test_codes_are_the_same_whenever_they_are_made():
    memory = ah.AssociativeMemory(patterns(700))
    loaded = ah.AssociativeMemory(patterns(5))
    loaded.load_state_dict(memory.state_dict())
    first, *others = memory, copy.deepcopy(memory), loaded
    for each in (first, *others):
        each.build_codes()
    assert all(
        torch.equal(*pair) for each in others for pair in zip(each._state.codes, first._state.codes, strict=True)
    )


@faiss
def test_patterns_in_other_dtypes_have_codes():
    stored = patterns()
    for each in (stored.bfloat16(), stored.double(), ((stored - stored.min()) * 20).byte()):
        query = each[::50]
        assert (ah.AssociativeMemory(each).recall(query, 100) == torch.arange(0, 4000, 50)).all()


@faiss
def test_codes_are_made_once_for_patterns_of_inference_mode(monkeypatch):
    with torch.inference_mode():
        memory = ah.AssociativeMemory(patterns(300))
    memory.recall(memory.patterns[:2], 20)
    monkeypatch.setattr(codes_module.Codes, "added", None)
    monkeypatch.setattr("ahop_layers.memory.state.make_codes", None)
    memory.recall(memory.patterns[:2], 20)


@faiss
def test_searches_see_one_state_while_patterns_are_added():
    stored = patterns(3000)
    memory, failed, done = ah.AssociativeMemory(stored[:1000]), [], threading.Event()
    memory.build_codes()

    def search():
        while not done.is_set():
            hits = memory.search(stored[:50] + 0.01, 2, 50)
            if not torch.equal(hits.indices[:, 0], torch.arange(50)):
                failed.append(hits)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for start in range(1000, 3000, 50):
        memory.add(stored[start : start + 50])
    done.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(memory._state.codes.packed) == 3000


def test_a_shortlist_needs_faiss(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    memory = ah.AssociativeMemory(patterns(50))
    refuses(r"a shortlist needs FAISS, got no installation: pip install ahop-layers\[search\]", memory.build_codes)
    refuses("needs FAISS", memory.recall, memory.patterns, 10)


def test_arguments_of_shortlists():
    memory = ah.AssociativeMemory(patterns(50))
    refuses("shortlist must be at least k = 3, got 2", memory.search, memory.patterns, 3, 2)
    refuses("shortlist", memory.search, memory.patterns, 3, 2.5)
    refuses("shortlist must be one of auto", memory.search, memory.patterns, 3, "all")
    refuses("bits must be a multiple of 8, got 12", memory.build_codes, 12)
    refuses("shortlist must be None for images", ah.AssociativeMemory(torch.rand(30, 6, 6)).build_codes)


@faiss
def test_auto_searches_all_patterns_where_no_shortlist_keeps_the_recall(small_fit, monkeypatch):
    monkeypatch.setattr("ahop_layers.memory.state.SHORTLIST_COST", 1)
    monkeypatch.setattr("ahop_layers.memory.state.LONGEST_SHORTLIST", 32)
    memory = ah.AssociativeMemory(patterns(600))
    memory.build_codes(8)
    report = memory.fit(ah.variants.Replaced(0.9, low=-4.0, high=4.0))
    assert report.shortlist.length == memory._state.fitted.shortlist == 600
    assert report.shortlist.recall == 1


@faiss
def test_auto_keeps_the_recall_that_the_report_says(small_fit, tmp_path, monkeypatch):
    monkeypatch.setattr("ahop_layers.memory.state.SHORTLIST_COST", 1)
    stored = patterns(1500)
    memory = ah.AssociativeMemory(stored)
    refuses("needs memory.build_codes", memory.search, stored, 1, "auto")
    memory.build_codes(16)
    report = memory.fit(ah.variants.Replaced((0.0, 0.6), low=-4.0, high=4.0))
    length = memory._state.fitted.shortlist
    assert report.shortlist.length == length < 500
    assert report.shortlist.recall >= 0.99
    assert f"shortlist of {length}: recall " in str(report)
    assert found(memory, stored, 0.4, shortlist="auto") > 0.97
    assert len(memory._state.codes.rate) == 16
    memory.save(tmp_path / "memory")
    assert torch.equal(memory.load(tmp_path / "memory").recall(stored[:9], "auto"), torch.arange(9))


@faiss
def test_auto_searches_few_patterns_exactly(small_fit):
    """Patterns of a shortlist are gathered, which takes longer than to score a few more of them in order."""
    memory = ah.AssociativeMemory(patterns(300, 8))
    memory.build_codes()
    assert memory.fit(ah.variants.Missing(0.1)).shortlist.length == 300


@faiss
def test_codes_follow_the_score():
    """A score of large differences needs wider waves than one that counts nearly equal values; so does a fit."""
    memory, rates = ah.AssociativeMemory(patterns(1500, 16)), []
    memory.build_codes()
    for width in (0.03, 3.0):
        memory.similarity.set_([("near", 0.1)], [width], torch.ones(1, 16))
        memory.build_codes()
        rates.append(memory._state.codes.rate.log2().mean())
    assert rates[1] < rates[0] - 1.5


@faiss
def test_a_damage_by_label_and_pairs_choose_a_length():
    stored = patterns(1000, 16)
    memory = ah.AssociativeMemory(stored, "l1", labels=torch.arange(1000) % 300)
    memory.build_codes()
    query, index = damaged(stored, 0.3, missing=True)
    for damage, by in (((index % 300, query), "label"), ((index, query), "pattern")):
        assert memory.fit(damage, by).shortlist.recall >= 0.99
