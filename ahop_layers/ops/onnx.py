"""Whether an ONNX exporter of torch traces a call."""

import sys
from typing import Any

import torch


def is_onnx_export() -> bool:
    """Returns whether ``torch.onnx.export`` traces this call.

    ``torch.onnx`` is not imported for the question: that takes as long as all of torch.
    """
    if torch.compiler.is_dynamo_compiling() or "torch.onnx" not in sys.modules:
        return False
    jit: Any = torch.jit
    return (torch.compiler.is_compiling() or jit.is_tracing()) and torch.onnx.is_in_onnx_export()
