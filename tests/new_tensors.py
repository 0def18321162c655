"""Records the sizes of the tensors that a computation allocates."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestNewTensor(TorchDispatchMode):
    """Records the number of elements of the largest new tensor; a view of an argument is not new."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, torch.Tensor) and not any(_share_memory(result, argument) for argument in args):
                self.elements = max(self.elements, result.numel())
        return results


def _share_memory(result, argument):
    if not isinstance(argument, torch.Tensor):
        return False
    return result.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
