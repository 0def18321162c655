"""adapt_ refuses wrapped and compiled models; a model that is adapted first trains alike on every rank."""

import json

import pytest
import torch
from torch import distributed, nn

import ahop_layers as ah

pytestmark = pytest.mark.slow

ADVICE = "call adapt_ first, and wrap or compile the adapted model"


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)


def refusal(model: nn.Module) -> str:
    """Returns the message of the error that adapt_ raises, or an empty string."""
    try:
        ah.adapt_(model)
    except ah.AHopError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2,))
    inner, outer = encoder(), encoder()
    fully_shard(inner.layers[1], mesh=mesh)
    fully_shard(outer, mesh=mesh)
    return {
        "DistributedDataParallel": refusal(DistributedDataParallel(encoder())),
        "inside": refusal(nn.Sequential(nn.Linear(4, 16), DistributedDataParallel(encoder()))),
        "FullyShardedDataParallel": refusal(FullyShardedDataParallel(encoder(), device_id=torch.device("cpu"))),
        "fully_shard": refusal(outer),
        "fully_shard inside": refusal(inner),
        "part of fully_shard": refusal(outer.layers[0]),
        "replicate": refusal(replicate(encoder())),
    }


def similarities_after_a_step(rank: int) -> list[list[float]]:
    """Adapts a model, wraps it, takes an optimizer step on the data of a rank, and returns the new similarities."""
    model = encoder()
    ah.adapt_(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ah.parameter_groups(wrapped, lr=0.1))
    inputs = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(rank))
    wrapped(inputs).square().mul(torch.linspace(-1, 1, 16)).sum().backward()
    optimizer.step()
    return [parameter.flatten().tolist() for parameter in ah.similarity_parameters(model)]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {"refusals": refusals(), "similarities": similarities_after_a_step(rank)}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(results, file)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


FOUND = {
    "DistributedDataParallel": "a model that is wrapped in DistributedDataParallel",
    "inside": "a model whose 1 is wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "a model that is wrapped in FullyShardedDataParallel",
    "fully_shard": "a model that is wrapped in FSDPModule",
    "fully_shard inside": "a model whose layers.1 is wrapped in FSDPModule",
    "part of fully_shard": "sharded, with DTensor parameters",
    "replicate": "a model that is wrapped in DDP",
}


@pytest.mark.full
def test_a_distributed_model_is_refused(results):
    for rank in results:
        assert set(rank["refusals"]) == set(FOUND)
        for name, message in rank["refusals"].items():
            assert FOUND[name] in message
            assert ADVICE in message


@pytest.mark.full
def test_similarities_stay_equal_on_all_ranks_if_the_model_is_adapted_first(results):
    first, second = (rank["similarities"] for rank in results)
    assert first == second
    fresh = encoder()
    ah.adapt_(fresh)
    initial = [parameter.flatten().tolist() for parameter in ah.similarity_parameters(fresh)]
    assert all(before != after for before, after in zip(initial, first, strict=True))


@pytest.mark.parametrize(("wrap", "found"), [
    (nn.DataParallel, "a model that is wrapped in DataParallel"),
    (torch.compile, "a model that is wrapped in OptimizedModule"),
    (lambda model: nn.Sequential(torch.compile(model)), "a model whose 0 is wrapped in OptimizedModule"),
    (lambda model: model.compile() or model, "a model that is compiled in place"),
], ids=["data-parallel", "compiled", "compiled inside", "compiled in place"])  # fmt: skip
def test_a_wrapped_or_compiled_model_is_refused(wrap, found):
    model = encoder()
    message = refusal(wrap(model))
    assert found in message
    assert ADVICE in message
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
