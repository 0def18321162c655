"""``python -m ahop_layers`` reports and tests the backends, and behaves like a command-line program."""

import re
from types import SimpleNamespace

import torch

import ahop_layers as ah
from ahop_layers import __main__ as command
from ahop_layers.ops import chunked
from ahop_layers.ops.backend import choose_kernel
from ahop_layers.ops.gpu import attend, launch, nvrtc
from ahop_layers.ops.protocols import AttentionCall


def test_the_command(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert shown.count("ok: error") >= 2
    assert "devices: CPU with" in shown
    assert re.search(r"^HopfieldLayer, .*: plain [\d.]+ ms, adaptive [\d.]+ ms \([\d.]+\)$", shown, re.MULTILINE)


def test_a_wrong_or_failing_backend_is_reported(monkeypatch, capsys):
    right = chunked.score
    monkeypatch.setattr(chunked, "score", lambda *args: right(*args) + 1e-3)
    assert command.main([]) == 1
    assert "WRONG: error" in capsys.readouterr().out
    monkeypatch.setattr(chunked, "score", lambda *args: 1 / 0)
    assert command.main([]) == 1
    assert "FAILED: ZeroDivisionError" in capsys.readouterr().out


def test_apple_gpus_run_plain_pytorch_and_say_so(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    assert ah.backends()["cuda"].detail == "Apple GPUs (mps) run plain PyTorch"
    query = SimpleNamespace(device=torch.device("mps"), dtype=torch.float32, shape=(1, 1, 4, 8))
    assert choose_kernel("auto", query, ("dis", "dot"), 8) is chunked
    assert command._device("chunked") == "mps"


def test_rocm_never_gets_kernels_of_cuda(monkeypatch):
    """torch calls the devices of ROCm cuda, too."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(nvrtc, "_capability", nvrtc._capability.__wrapped__)
    assert nvrtc.capability(device) == (0, 0)
    assert launch.unavailable() == "AMD GPUs run plain PyTorch"
    tensor = SimpleNamespace(device=device, dtype=torch.float16, shape=(1, 1, 16, 32))
    assert not attend.serves(AttentionCall(tensor, tensor, tensor, tensor, bases=("dis", "dot")))
    assert not launch.serves(tensor, ("dis", "dot"), 4)
