"""Detects models that were wrapped or compiled before adapt_ could add parameters."""

from typing import Any

from torch import nn

from ahop_layers.errors import AHopError
from ahop_layers.ops.operators import is_compiled

# Compared by name, because importing torch.distributed.fsdp or torch._dynamo takes seconds. DDP is the class that
# ``replicate`` adds to a module, FSDPModule the one that ``fully_shard`` adds.
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "DDP",
    "FullyShardedDataParallel",
    "FSDPModule",
    "OptimizedModule",
)


def check_not_wrapped(model: nn.Module) -> None:
    """Raises if a data-parallel wrapper, a sharded parameter or a compiled module is found in the model."""
    for name, module in model.named_modules():
        found = _wrapper(module)
        if found is not None:
            place = f"a model whose {name} is" if name else "a model that is"
            raise AHopError(
                f"model must be neither wrapped nor compiled yet, got {place} {found}; call adapt_ first, and wrap or"
                " compile the adapted model"
            )


def _wrapper(module: nn.Module) -> str | None:
    """Returns how a module is wrapped, or None."""
    mro: Any = type(module).__mro__
    for kind in mro:
        if kind.__name__ in _WRAPPERS and kind.__module__.partition(".")[0] == "torch":
            return f"wrapped in {kind.__name__}"
    if is_compiled(module):
        return "compiled in place"
    if any(type(parameter).__name__ == "DTensor" for parameter in module.parameters(recurse=False)):
        return "sharded, with DTensor parameters"
    return None
