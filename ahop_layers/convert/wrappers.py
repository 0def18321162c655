"""Detects models that were wrapped or compiled before adapt_ could add parameters."""

from torch import nn

from ahop_layers.errors import AHopError
from ahop_layers.ops.operators import is_compiled

# Compared by name, because importing torch.distributed.fsdp or torch._dynamo takes seconds. DDP is the class that
# ``replicate`` adds to a module, FSDPModule the one that ``fully_shard`` adds.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDPModule",
             "OptimizedModule")  # fmt: skip


def check_not_wrapped(model: nn.Module) -> None:
    """Raises if a data-parallel wrapper, a sharded parameter or a compiled module is found in the model."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        found = [f"wrapped in {kind}" for kind in kinds if kind in _WRAPPERS]
        found += ["compiled in place"] if is_compiled(module) else []
        sharded = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters(recurse=False))
        found += ["sharded, with DTensor parameters"] if sharded else []
        if found:
            place = f"a model whose {name} is" if name else "a model that is"
            raise AHopError(
                f"model must be neither wrapped nor compiled yet, got {place} {found[0]}; call adapt_ first, and wrap"
                " or compile the adapted model"
            )
