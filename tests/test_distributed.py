"""adapt_ refuses wrapped and compiled models; ``test_vit.py`` trains one that was adapted first in two processes."""

import pytest
import torch
from torch import nn

import ahop_layers as ah

pytestmark = pytest.mark.slow

ADVICE = "call adapt_ first, and wrap or compile the adapted model"


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)


def check_refused(model: nn.Module, found: str) -> None:
    with pytest.raises(ah.AHopError, match=ADVICE) as raised:
        ah.adapt_(model)
    assert found in str(raised.value)


@pytest.mark.full
def test_a_distributed_model_is_refused(process_group):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh, wrap = init_device_mesh("cpu", (1,)), nn.parallel.DistributedDataParallel
    inner, outer = encoder(), encoder()
    fully_shard(inner.layers[1], mesh=mesh)
    fully_shard(outer, mesh=mesh)
    sharded = FullyShardedDataParallel(encoder(), device_id=torch.device("cpu"))
    check_refused(wrap(encoder()), "a model that is wrapped in DistributedDataParallel")
    check_refused(nn.Sequential(nn.Linear(4, 16), wrap(encoder())), "a model whose 1 is wrapped in Distributed")
    check_refused(sharded, "a model that is wrapped in FullyShardedDataParallel")
    check_refused(outer, "a model that is wrapped in FSDPModule")
    check_refused(inner, "a model whose layers.1 is wrapped in FSDPModule")
    check_refused(outer.layers[0], "sharded, with DTensor parameters")
    check_refused(replicate(encoder()), "a model that is wrapped in DDP")


@pytest.mark.parametrize(("wrap", "found"), [
    (nn.DataParallel, "a model that is wrapped in DataParallel"),
    (torch.compile, "a model that is wrapped in OptimizedModule"),
    (lambda model: nn.Sequential(torch.compile(model)), "a model whose 0 is wrapped in OptimizedModule"),
    (lambda model: model.compile() or model, "a model that is compiled in place"),
], ids=["data-parallel", "compiled", "compiled inside", "compiled in place"])  # fmt: skip
def test_a_wrapped_or_compiled_model_is_refused(wrap, found):
    model = encoder()
    check_refused(wrap(model), found)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
