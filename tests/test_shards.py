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
from torch import distributed, nn

import ahop_layers as ah
from ahop_layers.learning import questions
from ahop_layers.memory import search as search_module
from ahop_layers.memory.shards import Shard
from ahop_layers.variants import Mixed, Noisy
from tests.samples import refuses

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
        "A-Hop", PATTERNS, blocks=ah.Blocks(torch.tensor([0, 1] * 4), normalize=True), bases=("l1", "dot")
    ),
    "K-Hop": lambda: ah.AssociativeMemory.preset("K-Hop", PATTERNS),
    "dis": lambda: ah.AssociativeMemory(PATTERNS, "dis", labels=LABELS),
    "half": lambda: ah.AssociativeMemory.preset("A-Hop", PATTERNS.bfloat16(), labels=LABELS),
}


def make(name: str) -> ah.AssociativeMemory:
    torch.manual_seed(0)
    memory = MEMORIES["A-Hop"]().double() if name == "double" else MEMORIES[name]()
    if memory.prior is not None:
        nn.init.normal_(memory.prior, std=0.3)
    return memory


def answers(memory: ah.AssociativeMemory, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {f"search {k}": memory.search(x, k) for k in (1, 10, 120)}
    found |= {f"shortlist {m}": memory.search(x, 3, shortlist=m) for m in (5, 120)}
    results = {f"{name} {index}": part for name, parts in found.items() for index, part in enumerate(parts)}
    results |= {"scores": memory.scores(x), "recall": memory.recall(x), "retrieve": memory.retrieve(x, 2)}
    results["energy"] = memory.energy(x)
    if memory.labels is not None:
        results |= {"class_scores": memory.class_scores(x), "classify": memory.classify(x), "classes": memory.classes}
    return {name: value.detach() for name, value in results.items()}


# Pairs in float64: in float32 a rounding error can swap two ranks that are nearly tied, and Adam amplifies that.
FITS = {
    "variant": ("A-Hop", {"damage": Mixed(0.5), "epochs": 4, "by": "pattern"}),
    "label variant": ("A-Hop", {"damage": Noisy(0.1), "epochs": 4, "by": "label"}),
    "label pairs": ("double", {"damage": (LABELS[PAIRS[0]], PAIRS[1]), "epochs": 2, "batch": 128, "by": "label"}),
    "separation": ("K-Hop", {"epochs": 10, "batch": 32}),
    "solved": ("double", {"damage": Mixed(0.5), "by": "pattern"}),
    "solved pairs": ("double", {"damage": (LABELS[PAIRS[0]], PAIRS[1]), "by": "label"}),
}


def fitted(name: str, memory: ah.AssociativeMemory) -> dict[str, torch.Tensor]:
    """Returns the losses, parameters and beta after a fit of a memory."""
    losses = memory.fit(**FITS[name][1], progress=False)
    losses = losses if isinstance(losses, torch.Tensor) else torch.tensor([accuracy for _, accuracy in losses.rows])
    return {"losses": losses, "beta": memory.beta, **{key: p.detach() for key, p in memory.named_parameters()}}


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


def gradients(model: Model) -> dict[str, torch.Tensor]:
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
    return gradients(model)


def message(call, *arguments) -> str:
    with pytest.raises(ah.AHopError) as caught:
        call(*arguments)
    return str(caught.value)


def refusals(rank: int, group: Any) -> dict[str, str]:
    """Returns the message of each error, by how it should start."""
    memory, ranks = make("A-Hop").shard_(group), distributed.get_world_size(group)

    def shard(*arguments: Any, **keywords: Any) -> None:
        ah.AssociativeMemory(*arguments, **keywords).shard_(group)

    agree = "all ranks of a sharded memory must make the same call, got"
    calls = {
        f"shard_ must be called once, got a memory that is sharded over {ranks} ranks": lambda: memory.shard_(group),
        "add must be called before shard_, got a memory that is sharded": lambda: memory.add(PATTERNS, labels=LABELS),
        "remove must be called before shard_, got a memory that is sharded": lambda: memory.remove([0]),
        "a sharded memory cannot be pickled: save its state dict": lambda: pickle.dumps(memory),
        "k must be at most the number of patterns, 203, got 204": lambda: memory.search(QUERIES, 204),
        f"the memory must have a pattern for each of {ranks} ranks, got 1 patterns": lambda: shard(PATTERNS[:1]),
        "patterns must have the same shape and dtype on all ranks, got (10": lambda: shard(PATTERNS[: 100 + rank]),
        "labels must be equal on all ranks of a sharded": lambda: shard(PATTERNS, labels=LABELS + rank),
        "patterns must be equal on all ranks of a sharded": lambda: shard(PATTERNS + rank),
        f"{agree} search(k=": lambda: memory.search(QUERIES, 1 + rank),
        f"{agree} ": lambda: (memory.classify, memory.scores)[rank % 2](QUERIES),
        f"{agree} fit(": lambda: memory.fit(PAIRS, seed=rank),
        "data must be equal on all ranks of a sharded": lambda: memory.fit((PAIRS[0], PAIRS[1] + rank), progress=False),
    }
    return {text: message(call) for text, call in calls.items()}


def loaded() -> ah.AssociativeMemory:
    """Returns a memory with other patterns and labels, and fewer of them."""
    memory = make("A-Hop")
    other = {"patterns": 2 * PATTERNS[:180], "labels": LABELS[:180] + 1, "prior": torch.linspace(0, 1, 180)}
    memory.load_state_dict(memory.state_dict() | other)
    return memory


def states(group: Any, folder: str) -> dict[str, object]:
    """Saves, loads, copies and converts sharded memories."""
    memory = make("A-Hop").shard_(group)
    keys, part = set(memory.state_dict()), memory.patterns
    memory.load_state_dict(loaded().state_dict())
    message(memory.load_state_dict, make("A-Hop").state_dict() | {"similarity.w": torch.zeros(2, 9)})
    memory.load_state_dict(memory.state_dict())
    double = copy.deepcopy(memory).double()
    memory.save(f"{folder}/memory.safetensors")
    distributed.barrier(group)
    return {
        "saved": answers(ah.AssociativeMemory.load(f"{folder}/memory.safetensors"), QUERIES),
        "confidence": memory.search(QUERIES, 2).confidence,
        "reasons": memory.explain(QUERIES),
        "keys": keys,
        "part": part,
        "loaded": answers(memory, QUERIES),
        "converted": (double.patterns.dtype, double.labels.dtype),
        "copied": double.recall(QUERIES.double()),
    }


def own_answers(rank: int, group: Any) -> dict[str, torch.Tensor]:
    """Asks other queries on each rank, of a memory whose parameters differ between the ranks before it is sharded."""
    memory = make("A-Hop")
    memory.similarity.bias.data += 0.1 * rank
    return answers(memory.shard_(group), batch_of(rank))


def work(rank: int, group: Any, folder: str) -> dict[str, object]:
    """Returns the results of a rank of a group; None is the group of all processes."""
    return {
        "answers": {name: answers(make(name).shard_(group), QUERIES) for name in MEMORIES},
        "own answers": own_answers(rank, group),
        "fits": {name: fitted(name, make(kind).shard_(group)) for name, (kind, _) in FITS.items()},
        "gradients": sharded_gradients(rank, group),
        "states": states(group, folder),
        "refusals": refusals(rank, group),
    }


def run(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    search_module.BLOCK_ELEMENTS = 8 * 30  # several blocks in each shard
    questions.QUERIES = questions.MOST_QUERIES = 128
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group = distributed.new_group([0, 1]) if ranks == 2 else None
    torch.save(work(rank, group, folder), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)], ids=lambda ranks: f"{ranks}ranks")
def results(request, tmp_path_factory):
    """The results of all ranks. The processes are forked from one that has imported torch, to save time."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("ranks")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_forkserver_preload(["torch._dynamo"])  # optimizers import it
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


def test_ranks_may_ask_different_queries_and_get_the_parameters_of_the_first(results):
    for index, rank in enumerate(results):
        compare(rank["own answers"], answers(make("A-Hop"), batch_of(index)))


@pytest.mark.parametrize("name", FITS)
def test_a_fit_gives_what_one_process_gives(results, name, monkeypatch):
    for constant in ("QUERIES", "MOST_QUERIES"):
        monkeypatch.setattr(questions, constant, 128)
    expected = fitted(name, make(FITS[name][0]))
    for rank in results:
        compare(rank["fits"][name], expected)


def test_gradients_under_distributed_data_parallel_are_those_of_one_process(results):
    model = Model()
    for rank in range(len(results)):
        (model(batch_of(rank)).square().sum() / len(results)).backward()
    for rank in results:
        compare(rank["gradients"], gradients(model))


def test_a_sharded_memory_is_saved_loaded_copied_and_converted(results):
    expected = loaded()
    for rank in results:
        compare(rank["states"]["loaded"], answers(expected, QUERIES))
        compare(rank["states"]["saved"], answers(expected, QUERIES))
        torch.testing.assert_close(rank["states"]["confidence"], expected.search(QUERIES, 2).confidence)
        torch.testing.assert_close(rank["states"]["reasons"], expected.explain(QUERIES))
        assert rank["states"]["keys"] == set(make("A-Hop").state_dict()) - {"patterns", "labels"}
        assert rank["states"]["converted"] == (torch.float64, torch.int64)
        assert torch.equal(rank["states"]["copied"], copy.deepcopy(expected).double().recall(QUERIES.double()))
    assert torch.equal(torch.cat([rank["states"]["part"] for rank in results]), PATTERNS)


def test_what_cannot_work_sharded_is_refused(results):
    for rank in results:
        for text, got in rank["refusals"].items():
            assert got.startswith(text)


def test_without_a_process_group_sharding_is_refused():
    refuses(r"shard_ needs torch\.distributed: call .*init_process_group first", ah.AssociativeMemory(PATTERNS).shard_)


def test_a_failed_communication_is_not_blamed_on_the_device(process_group, monkeypatch):
    memory = ah.AssociativeMemory(torch.eye(3)).shard_()
    monkeypatch.setattr(distributed, "all_gather", Mock(side_effect=RuntimeError("connection closed by peer")))
    with pytest.raises(RuntimeError, match="connection closed by peer") as raised:
        memory.search(torch.eye(3))
    assert not isinstance(raised.value, ah.AHopError)
    refuses("group must support tensors on meta", Shard, None, 3, torch.device("meta"))


@pytest.mark.parametrize(("similarity", "dtype", "value"), [("dis", torch.float16, 100.0), ("l1", torch.float32, 1e25)])
def test_large_values_of_queries_are_scored_as_in_one_process(process_group, similarity, dtype, value):
    patterns = torch.rand(50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    query = patterns[:9].clone()
    query[:, :10] = value
    whole, shard = ah.AssociativeMemory(patterns, similarity), ah.AssociativeMemory(patterns, similarity).shard_()
    assert torch.equal(shard.scores(query), whole.scores(query))
    assert whole.scores(query).isfinite().all()


def test_invalid_queries_raise_on_every_rank(process_group, monkeypatch):
    memory, gather = ah.AssociativeMemory(torch.eye(3)).shard_(), Shard.gather
    monkeypatch.setattr(Shard, "agree", lambda self, call, device: None)
    sent = []
    monkeypatch.setattr(Shard, "gather", lambda self, tensor: sent.append(tensor) or gather(self, tensor))
    refuses("queries x must be", memory.search, torch.eye(4))
    assert sent[0].tolist() == [0, 0, 1, 4]  # the other ranks are told
    monkeypatch.setattr(Shard, "gather", lambda self, tensor: torch.stack([tensor, sent[0]]))
    refuses("queries x must be valid on all ranks, got an error on rank 1", memory.search, torch.eye(3))
