"""The benchmark of vision transformers: every part runs, and its candidates sort."""

import math

import pytest
from frameworks import framework

from benchmarks import vit, vit_layers, vit_report
from benchmarks.harness.rows import read

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", [pytest.param("eager", marks=pytest.mark.full), "attention"])
def test_training_and_inference_are_compared_with_the_dot_product_of_the_same_run(part, tmp_path):
    framework("timm")
    small = ["--models", "tiny", "--batch", "2", "--image", "32", "--turns", "1", "--seconds", "0"]
    vit.main([*small, "--parts", part, "--attentions", "4 blocks", "--output", str(tmp_path / "vit.csv")])
    rows, figure = read(tmp_path / "vit.csv"), "images/s" if part == "eager" else "seconds"
    assert [row["attention"] for row in rows] == ["dot", "4 blocks"] * 2
    for dot, blocks in (rows[:2], rows[2:]):
        assert 0 < float(dot[figure]) == float(dot[f"sdpa {figure}"]) == float(blocks[f"sdpa {figure}"])


def test_memory_and_first_calls_are_measured(tmp_path, monkeypatch):
    for name in ("AHOP_CACHE_DIR", "CUDA_CACHE_DISABLE"):
        monkeypatch.setenv(name, "")  # restored at the end
    monkeypatch.setattr(vit_layers, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(vit_layers, "CALLS", {"first call": 5, "another length": 7})
    few = ["--parts", "memory", "compile-time", "--tokens", "256", "--lengths", "16", "64", "--attentions", "full"]
    vit.main([*few, "--output", str(tmp_path / "vit.csv")])
    memory, calls = (read(tmp_path / "vit.csv")[part] for part in (slice(0, 2), slice(2, 4)))
    assert [row["settings"] for row in memory] == ["256 tokens, length 16", "256 tokens, length 64"]
    assert all(math.isfinite(float(row["MB"])) for row in memory)  # this process may even free some
    assert vit_report.of_memory(memory).splitlines()[-1].startswith("| full | ")
    assert [(row["settings"], row["kernels"]) for row in calls] == [("length 5", "0"), ("length 7", "0")]
    assert all(float(row["seconds"]) > 0 for row in calls)
