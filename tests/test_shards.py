"""A memory whose patterns are shared out among processes gives on every rank what one process gives.

Four processes do all of the work once: as a group of four, and the first two of them as a group of two.
"""

import copy
import multiprocessing
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed, nn

import ahop_layers as ah
from ahop_layers.memory import scoring
from ahop_layers.variants import Mixed, Noisy

pytestmark = pytest.mark.slow

# Multiples of 1/64: distances are exact, and scores of equal patterns are equal in any block and on any rank.
PATTERNS = torch.randint(-64, 65, (203, 8), generator=torch.Generator().manual_seed(1)) / 64
PATTERNS[150:160] = PATTERNS[:10]  # equal scores, in different shards
LABELS = torch.arange(203).remainder(7).mul(3).sub(5)
LABELS[120] = 99  # the only one of its class
QUERIES = PATTERNS[::9] + torch.randint(-16, 17, (23, 8), generator=torch.Generator().manual_seed(2)) / 64
NOISE = torch.randn(406, 8, generator=torch.Generator().manual_seed(3))
PAIRS = (torch.arange(203).repeat(2), PATTERNS.repeat(2, 1) + 0.4 * NOISE)
MEMORIES = {
    "A-Hop": lambda: ah.AssociativeMemory.preset("A-Hop", PATTERNS, debias=True, labels=LABELS, prior=True),
    "blocks": lambda: ah.AssociativeMemory.preset(
        "A-Hop", PATTERNS, blocks=[None, ah.Blocks(torch.tensor([0, 1] * 4), normalize=True)], bases=("l1", "dot")
    ),
    "S-Hop": lambda: ah.AssociativeMemory.preset("S-Hop", PATTERNS),
    "K-Hop": lambda: ah.AssociativeMemory.preset("K-Hop", PATTERNS),
    "dis": lambda: ah.AssociativeMemory(PATTERNS, "dis", labels=LABELS),
    "double": lambda: ah.AssociativeMemory.preset("A-Hop", PATTERNS.double(), debias=True, labels=LABELS, prior=True),
    "half": lambda: ah.AssociativeMemory.preset("A-Hop", PATTERNS.bfloat16(), labels=LABELS),
}


def make(name: str) -> ah.AssociativeMemory:
    torch.manual_seed(0)
    memory = MEMORIES[name]()
    if memory.prior is not None:
        nn.init.normal_(memory.prior, std=0.3)
    return memory


def answers(memory: ah.AssociativeMemory, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {f"search {k}": memory.search(x, k) for k in (1, 10, 120)}
    found |= {f"shortlist {m}": memory.search(x, 3, shortlist=m) for m in (5, 120)}
    results = {f"{name} scores": scores for name, (scores, _) in found.items()}
    results |= {f"{name} indices": indices for name, (_, indices) in found.items()}
    results |= {"scores": memory.scores(x), "recall": memory.recall(x), "retrieve": memory.retrieve(x, 2)}
    results["energy"] = memory.energy(x)
    if memory.labels is not None:
        results |= {"class_scores": memory.class_scores(x), "classify": memory.classify(x), "classes": memory.classes}
    return {name: value.detach() for name, value in results.items()}


# Pairs in float64: in float32 a rounding error can swap two ranks that are nearly tied, and Adam amplifies that.
FITS = {
    "variant": ("A-Hop", lambda memory: memory.fit(Mixed(0.5), epochs=4, batch=512, progress=False)),
    "pairs": ("double", lambda memory: memory.fit(PAIRS, epochs=2, batch=128, progress=False)),
    "label variant": ("A-Hop", lambda memory: memory.fit(Noisy(0.1), 4, batch=512, by="label", progress=False)),
    "label pairs": (
        "double",
        lambda memory: memory.fit((LABELS[PAIRS[0]], PAIRS[1]), 2, batch=128, by="label", progress=False),
    ),
    "separation": ("K-Hop", lambda memory: memory.fit(epochs=10, batch=32, progress=False)),
}


def fitted(name: str, memory: ah.AssociativeMemory) -> dict[str, torch.Tensor]:
    """Returns the losses, parameters and beta after a fit of a memory."""
    losses = FITS[name][1](memory)
    return {"losses": losses, "beta": memory.beta, **{key: p.detach() for key, p in memory.named_parameters()}}


@cache
def expected_answers(name: str) -> dict[str, torch.Tensor]:
    return answers(make(name), QUERIES)


@cache
def expected_fit(name: str) -> dict[str, torch.Tensor]:
    return fitted(name, make(FITS[name][0]))


class Model(nn.Module):
    """A memory behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.memory = nn.Linear(8, 8), make("A-Hop")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory(self.layer(x)) + self.memory.class_scores(self.layer(x)).sum(-1, keepdim=True)


def batch_of(rank: int) -> torch.Tensor:
    """Returns the queries of a rank; their number differs."""
    return QUERIES[3 * rank : 3 * rank + 3 + rank]


def gradients(ranks: int) -> dict[str, torch.Tensor]:
    """Returns the mean over ranks of the gradients of one process."""
    model = Model()
    for rank in range(ranks):
        (model(batch_of(rank)).square().sum() / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded_gradients(rank: int, group: Any) -> dict[str, torch.Tensor]:
    model = Model()
    model.memory.shard_(group)
    patterns = model.memory.patterns.clone()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    for _ in range(2):  # buffers are broadcast before each forward pass
        wrapped.zero_grad()
        wrapped(batch_of(rank)).square().sum().backward()
    assert torch.equal(model.memory.patterns, patterns)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def message(call) -> str:
    with pytest.raises(ah.AHopError) as caught:
        call()
    return str(caught.value)


def refusals(rank: int, group: Any) -> dict[str, str]:
    memory = make("A-Hop").shard_(group)
    few = ah.AssociativeMemory(torch.eye(8)[:1])
    return {
        "again": message(lambda: memory.shard_(group)),
        "add": message(lambda: memory.add(PATTERNS, labels=LABELS)),
        "remove": message(lambda: memory.remove([0])),
        "pickle": message(lambda: pickle.dumps(memory)),
        "k": message(lambda: memory.search(QUERIES, 204)),
        "few": message(lambda: few.shard_(group)),
        "patterns": message(lambda: ah.AssociativeMemory(PATTERNS[: 100 + rank]).shard_(group)),
        "labels": message(lambda: ah.AssociativeMemory(PATTERNS, labels=LABELS + rank).shard_(group)),
        "data": message(lambda: memory.fit((PAIRS[0], PAIRS[1] + rank), progress=False)),
    }


def loaded() -> ah.AssociativeMemory:
    """Returns a memory with other patterns and labels, and fewer of them."""
    memory = make("A-Hop")
    other = {"patterns": 2 * PATTERNS[:180], "labels": LABELS[:180] + 1, "prior": torch.linspace(0, 1, 180)}
    memory.load_state_dict(memory.state_dict() | other)
    return memory


def states(group: Any) -> dict[str, object]:
    """Saves, loads, copies and converts sharded memories."""
    memory = make("A-Hop").shard_(group)
    keys, part = set(memory.state_dict()), memory.patterns
    memory.load_state_dict(loaded().state_dict())
    broken = make("A-Hop").state_dict() | {"similarity.w": torch.zeros(2, 9)}
    message(lambda: memory.load_state_dict(broken))
    weights = memory.state_dict()
    memory.load_state_dict(weights)
    double = copy.deepcopy(memory).double()
    return {
        "keys": keys,
        "part": part,
        "loaded": answers(memory, QUERIES),
        "converted": (double.patterns.dtype, double.labels.dtype),
        "copied": double.recall(QUERIES.double()),
    }


def differing(rank: int, group: Any) -> torch.Tensor:
    """Makes memories whose parameters differ between the ranks equal."""
    memory = make("A-Hop")
    nn.init.constant_(memory.similarity.bias, 0.1 * rank)
    return memory.shard_(group).similarity.bias.detach()


def work(rank: int, group: Any) -> dict[str, object]:
    """Returns the results of a rank of a group; None is the group of all processes."""
    return {
        "answers": {name: answers(make(name).shard_(group), QUERIES) for name in MEMORIES},
        "own answers": answers(make("A-Hop").shard_(group), batch_of(rank)),
        "fits": {name: fitted(name, make(kind).shard_(group)) for name, (kind, _) in FITS.items()},
        "gradients": sharded_gradients(rank, group),
        "states": states(group),
        "first": differing(rank, group),
        "refusals": {} if group is None else refusals(rank, group),
    }


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    scoring.BLOCK_ELEMENTS = 8 * 30  # several blocks in each shard
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=4)
    pair = distributed.new_group([0, 1])
    torch.save(work(rank, None), f"{folder}/4-{rank}.pt")
    if rank < 2:
        torch.save(work(rank, pair), f"{folder}/2-{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of all ranks. The processes are forked from one that has imported torch, to save time."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("ranks")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_forkserver_preload(["torch._dynamo"])  # optimizers import it
    torch.multiprocessing.start_processes(run, (str(folder),), nprocs=4, start_method=method)
    return folder


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks}ranks")
def results(request, folder):
    return [torch.load(folder / f"{request.param}-{rank}.pt", weights_only=False) for rank in range(request.param)]


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
    for rank in results:
        compare(rank["answers"][name], expected_answers(name))


def test_ranks_may_ask_different_queries(results):
    for index, rank in enumerate(results):
        compare(rank["own answers"], answers(make("A-Hop"), batch_of(index)))


@pytest.mark.parametrize("name", FITS)
def test_a_fit_gives_what_one_process_gives(results, name):
    for rank in results:
        compare(rank["fits"][name], expected_fit(name))


def test_gradients_under_distributed_data_parallel_are_those_of_one_process(results):
    expected = gradients(len(results))
    for rank in results:
        compare(rank["gradients"], expected)


def test_parameters_are_copied_from_the_first_rank(results):
    for rank in results:
        assert not rank["first"].any()


def test_a_sharded_memory_is_saved_loaded_copied_and_converted(results):
    expected = loaded()
    for rank in results:
        compare(rank["states"]["loaded"], answers(expected, QUERIES))
        assert rank["states"]["keys"] == set(make("A-Hop").state_dict()) - {"patterns", "labels"}
        assert rank["states"]["converted"] == (torch.float64, torch.int64)
        assert torch.equal(rank["states"]["copied"], copy.deepcopy(expected).double().recall(QUERIES.double()))
    assert torch.equal(torch.cat([rank["states"]["part"] for rank in results]), PATTERNS)


def test_what_cannot_work_sharded_is_refused(results):
    if len(results) != 2:
        pytest.skip("the same for any number of ranks")
    for rank in results:
        for name, text in {
            "again": "shard_ must be called once, got a memory that is sharded over 2 ranks",
            "add": "add must be called before shard_, got a memory that is sharded",
            "remove": "remove must be called before shard_, got a memory that is sharded",
            "pickle": "a sharded memory cannot be pickled: save its state dict",
            "k": "k must be at most the number of patterns, 203, got 204",
            "few": "the memory must have a pattern for each of 2 ranks, got 1 patterns",
            "patterns": "patterns must have the same shape and dtype on all ranks, got (10",
            "labels": "labels must be equal on all ranks of a sharded memory, got different values",
            "data": "data must be equal on all ranks of a sharded memory, got different values",
        }.items():
            assert rank["refusals"][name].startswith(text), name


def test_without_a_process_group_sharding_is_refused():
    with pytest.raises(ah.AHopError, match=r"shard_ needs torch\.distributed: call .*init_process_group first"):
        ah.AssociativeMemory(PATTERNS).shard_()
