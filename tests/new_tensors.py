"""The sizes of the tensors that a computation allocates, and their sum at the peak."""

from itertools import accumulate

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


def peak_memory(call):
    """Returns the result of a call and the largest number of bytes that it held at once."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return result, max(accumulate(held))
