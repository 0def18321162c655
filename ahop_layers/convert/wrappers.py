"""Detects models that were wrapped, compiled or given adapters before adapt_ could add parameters."""

import warnings
from typing import Any

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
        kinds: Any = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
        wrapper = next((kind.__name__ for kind in kinds if kind.__name__ in _WRAPPERS), None)
        found = None if wrapper is None else f"wrapped in {wrapper}"
        if found is None and is_compiled(module):
            found = "compiled in place"
        if found is None and any(type(p).__name__ == "DTensor" for p in module.parameters(recurse=False)):
            found = "sharded, with DTensor parameters"
        if found is not None:
            place = f"a model whose {name} is" if name else "a model that is"
            raise AHopError(
                f"model must be neither wrapped nor compiled yet, got {place} {found}; call adapt_ first, and wrap or"
                " compile the adapted model"
            )


def warn_about_peft(model: nn.Module) -> None:
    """Warns if a model has adapters of PEFT, whose ``save_pretrained`` stores only the modules it was told of."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        warnings.warn(
            "save_pretrained of PEFT does not store similarities that are added later: call adapt_ first, then"
            " get_peft_model with modules_to_save=['similarity'] in its config, or use save_similarities",
            stacklevel=3,
        )
