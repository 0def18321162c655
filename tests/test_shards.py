"""A memory whose patterns are shared out among processes gives on every rank what one process gives.

Two processes do all of the work once, as a given group; in ``make test-all`` also four, as the group of all processes.
"""

import copy
import multiprocessing
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

import ahop_layers as ah
from ahop_layers.memory import state as state_module
from tests.samples import refuses

pytestmark = pytest.mark.slow

# Multiples of 1/64: distances are exact, and scores of equal patterns are equal in any chunk and on any rank.
PATTERNS = torch.randint(-64, 65, (203, 8), generator=torch.Generator().manual_seed(1)) / 64
PATTERNS[150:160] = PATTERNS[:10]  # equal scores, in different shards
LABELS = torch.arange(203).remainder(7).mul(3).sub(5)
LABELS[120] = 99  # the only one of its class
QUERIES = PATTERNS[::9] + torch.randint(-16, 17, (23, 8), generator=torch.Generator().manual_seed(2)) / 64
BLOCKS = ah.Blocks(torch.tensor([0, 1] * 4), normalize=True)
MEMORIES = {
    "auto": lambda: ah.AssociativeMemory(PATTERNS, labels=LABELS, ids=range(203)),
    "blocks": lambda: ah.AssociativeMemory(PATTERNS, ah.AdaptiveSimilarity(8, bases=("l1", "dot"), blocks=BLOCKS)),
    "dis": lambda: ah.AssociativeMemory(PATTERNS, "dis", labels=LABELS),
    "half": lambda: ah.AssociativeMemory(PATTERNS.bfloat16(), "adaptive", labels=LABELS),
}


def make(name: str) -> ah.AssociativeMemory:
    """A memory whose confidence is calibrated, without a fit."""
    memory = MEMORIES[name]()
    memory.load_state_dict({"calibration": torch.tensor([0.3, 0.2, 0.5, -1.0])}, strict=False)
    return memory


def answers(memory: ah.AssociativeMemory, x: torch.Tensor) -> dict[str, torch.Tensor]:
    results = {}
    for k in (1, 10, 120):
        hits = memory.search(x, k)
        results |= {f"scores {k}": hits.scores, f"indices {k}": hits.indices, f"confidence {k}": hits.confidence}
        if memory.ids is not None:
            results[f"ids {k}"] = torch.tensor(hits.ids)
        if memory.labels is not None:
            results[f"labels {k}"] = hits.labels
    results |= {"scores": memory.scores(x), "recall": memory.recall(x)}
    if memory.labels is not None:
        results |= {"class_scores": memory.class_scores(x), "classify": memory.classify(x), "classes": memory.classes}
    return {name: value.detach() for name, value in results.items()}


def message(call, *arguments) -> str:
    with pytest.raises(ah.AHopError) as caught:
        call(*arguments)
    return str(caught.value)


def refusals(rank: int, group: Any) -> dict[str, str]:
    """Returns the message of each error, by how it should start."""
    memory, ranks = make("auto").shard_(group), distributed.get_world_size(group)

    def shard(*arguments: Any, **keywords: Any) -> None:
        ah.AssociativeMemory(*arguments, **keywords).shard_(group)

    before, agree = "must be called before shard_, got a memory that is sharded", "all ranks of a sharded memory must"
    calls = {
        f"shard_ {before}": lambda: memory.shard_(group),
        f"add {before}": lambda: memory.add(PATTERNS, labels=LABELS, ids=range(203)),
        f"remove {before}": lambda: memory.remove([0]),
        f"fit {before}": lambda: memory.fit(),
        f"explain {before}": lambda: memory.explain(QUERIES),
        f"retrieve {before}": lambda: memory.retrieve(QUERIES),
        f"save {before}": lambda: memory.save("memory"),
        f"load_state_dict {before}": lambda: memory.load_state_dict(make("auto").state_dict()),
        "a sharded memory cannot be pickled": lambda: pickle.dumps(memory),
        "k must be at most the number of patterns, 203, got 204": lambda: memory.search(QUERIES, 204),
        f"the memory must have a pattern for each of {ranks} ranks, got 1 patterns": lambda: shard(PATTERNS[:1]),
        f"{agree} make the same call with equal values, got shard_ of (10": lambda: shard(PATTERNS[: 100 + rank]),
        f"{agree} make the same call with equal values, got shard_ with labels": lambda: shard(
            PATTERNS, labels=LABELS + rank
        ),
        f"{agree} make the same call with equal values, got shard_ with": lambda: shard(PATTERNS + rank),
        f"{agree} make the same call with equal values, got search(k=": lambda: memory.search(QUERIES, 1 + rank),
        f"{agree} make the same call with equal values, got search(k=1)": lambda: memory.search(QUERIES + rank),
        f"{agree} make the same call with equal values, got ": lambda: (memory.classify, memory.scores)[rank % 2](
            QUERIES
        ),
        f"{agree}": lambda: memory.search(QUERIES if rank else QUERIES[:, :3]),
    }
    return {text: message(call) for text, call in calls.items()}


def states(group: Any) -> dict[str, object]:
    """Copies and converts a sharded memory, and loads the state of its similarity."""
    memory = make("auto")
    memory.build_codes()  # of all patterns
    memory.shard_(group)
    short = memory.recall(QUERIES, 60)
    memory.load_state_dict(memory.state_dict())
    double = copy.deepcopy(memory).double()
    return {
        "keys": set(memory.state_dict()),
        "part": memory.patterns,
        "short": short,
        "converted": (double.patterns.dtype, double.labels.dtype),
        "copied": double.recall(QUERIES.double()),
    }


def first_parameters(rank: int, group: Any) -> dict[str, torch.Tensor]:
    """Answers of a memory whose parameters differ between the ranks before it is sharded."""
    memory = make("blocks")
    memory.similarity.w.data += 0.1 * rank
    return answers(memory.shard_(group), QUERIES)


def run(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    state_module.CHUNK_ELEMENTS = 8 * 30  # several chunks in each shard
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group = distributed.new_group([0, 1]) if ranks == 2 else None
    results = {
        "answers": {name: answers(make(name).shard_(group), QUERIES) for name in MEMORIES},
        "first parameters": first_parameters(rank, group),
        "states": states(group),
        "refusals": refusals(rank, group),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)], ids=lambda ranks: f"{ranks}ranks")
def results(request, tmp_path_factory):
    """The results of all ranks. The processes are forked from one that has imported torch, to save time."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("ranks")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_forkserver_preload(["torch"])
    arguments = str(folder), request.param
    torch.multiprocessing.start_processes(run, arguments, nprocs=request.param, start_method=method)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            tolerance = 1e-4 if value.itemsize > 2 else 4 * torch.finfo(value.dtype).eps
            torch.testing.assert_close(got[name], value, atol=tolerance, rtol=tolerance, msg=name)
        else:
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("name", MEMORIES)
def test_every_rank_finds_what_one_process_finds(results, name):
    expected = answers(make(name), QUERIES)
    for rank in results:
        compare(rank["answers"][name], expected)


def test_ranks_get_the_parameters_of_the_first(results):
    for rank in results:
        compare(rank["first parameters"], answers(make("blocks"), QUERIES))


def test_a_sharded_memory_is_copied_and_converted(results):
    expected = make("auto")
    for rank in results:
        assert rank["states"]["keys"] == set(expected.state_dict()) - {"patterns", "labels", "ids"}
        assert (rank["states"]["short"] == expected.recall(QUERIES)).float().mean() > 0.9
        assert rank["states"]["converted"] == (torch.float64, torch.int64)
        assert torch.equal(rank["states"]["copied"], copy.deepcopy(expected).double().recall(QUERIES.double()))
    assert torch.equal(torch.cat([rank["states"]["part"] for rank in results]), PATTERNS)


def test_what_cannot_work_sharded_is_refused(results):
    for rank in results:
        for text, got in rank["refusals"].items():
            assert got.startswith(text)


def test_without_a_process_group_sharding_is_refused():
    refuses(r"shard_ needs torch\.distributed: call .*init_process_group first", ah.AssociativeMemory(PATTERNS).shard_)


def test_a_failed_communication_is_not_blamed_on_the_queries(process_group, monkeypatch):
    memory = ah.AssociativeMemory(torch.eye(3)).shard_()
    monkeypatch.setattr(distributed, "all_gather", Mock(side_effect=RuntimeError("connection closed by peer")))
    with pytest.raises(RuntimeError, match="connection closed by peer") as raised:
        memory.search(torch.eye(3))
    assert not isinstance(raised.value, ah.AHopError)
