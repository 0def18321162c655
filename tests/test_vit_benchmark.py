"""The benchmark of vision transformers: its measurements, rows and tables."""

import sys

import pytest
import torch
from frameworks import framework

import ahop_layers as ah
from benchmarks import vit, vit_layers, vit_report
from benchmarks.harness.rows import read

pytestmark = pytest.mark.slow
SMALL = ["--models", "tiny", "--batch", "2", "--image", "32", "--turns", "1", "--seconds", "0"]


@pytest.mark.full
def test_training_and_inference_are_compared_with_the_dot_product_of_the_same_run(tmp_path, capsys):
    framework("timm")
    output = ["--output", str(tmp_path / "vit.csv")]
    vit.main([*SMALL, "--parts", "eager", "--attentions", "4 blocks", *output])
    rows = read(tmp_path / "vit.csv")
    assert [(row["attention"], row["pass"]) for row in rows] == [
        (attention, label) for label in vit.PASSES for attention in ("dot", "4 blocks")
    ]
    assert {row["settings"] for row in rows} == {"32 px, batch 2"}
    assert all(float(row["images/s"]) > 0 and not row["MB"] for row in rows)  # memory is measured on a GPU only
    for dot, blocks in (rows[:2], rows[2:]):
        assert dot["images/s"] == dot["sdpa images/s"] == blocks["sdpa images/s"]
    assert "tiny       training   4 blocks" in capsys.readouterr().out
    vit.main([*SMALL, "--parts", "eager", "--attentions", "dot", "--passes", "inference", *output])
    again = read(tmp_path / "vit.csv")  # the same measurement is replaced, the others are kept
    assert [row["attention"] for row in again] == [row["attention"] for row in rows]
    assert again[0] == rows[0]
    assert again[3] == rows[3]


def test_candidates_sort():
    """The weights of every base differ, so that kernels cannot skip the sort, and are the same in every run."""
    layers = [vit_layers.make_layer("4 blocks", "cpu") for _ in range(2)]
    assert torch.equal(layers[0].similarity.w, layers[1].similarity.w)
    w, beta = layers[0].similarity.w, layers[0].similarity.beta
    assert (w.sort(-1).values.diff(dim=-1) > 1e-6).all()
    assert (beta.abs() > 1e-6).all()
    assert not list(ah.similarity_parameters(vit_layers.make_layer("dot", "cpu")))


def test_attention_alone_is_compared_with_the_dot_product(tmp_path):
    framework("timm")
    few = ["--attentions", "8 blocks", "--batch", "1", "--turns", "1", "--seconds", "0"]
    vit.main(["--parts", "attention", *few, "--output", str(tmp_path / "vit.csv")])
    rows = read(tmp_path / "vit.csv")
    assert [(row["attention"], row["pass"]) for row in rows] == [
        (attention, label) for label in ("forward", "forward + backward") for attention in ("dot", "8 blocks")
    ]
    assert rows[0]["seconds"] == rows[1]["sdpa seconds"]
    assert vit_report.of_attention(rows).splitlines()[2].split(" | ")[2::2] == ["1.00", "1.00 |"]
    x = torch.randn(1, 3, 3 * vit_layers.WIDTH)
    for name, candidate in vit_layers.TIMED.items():  # without projections
        layer = vit_layers.bare_attention(candidate, "cpu")
        assert layer(x).shape == (1, 3, vit_layers.WIDTH)
        owners = {parameter.rpartition(".")[0] for parameter, _ in layer.named_parameters()}
        assert owners == (set() if name == "dot" else {"similarity"})


def test_one_layer_at_a_constant_number_of_tokens(tmp_path, monkeypatch):
    shapes = []
    monkeypatch.setattr(vit_layers, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(vit_layers, "reset_peak", lambda device: 5_000_000)
    monkeypatch.setattr(vit_layers, "peak", lambda device: 7_000_000)
    monkeypatch.setattr(vit_layers, "forward_and_backward", lambda layer, x: shapes.append(tuple(x.shape)))
    few = ["--parts", "memory", "--tokens", "64", "--lengths", "16", "64", "--attentions", "4 blocks"]
    vit.main([*few, "--output", str(tmp_path / "vit.csv")])
    assert [shape for shape in shapes if shape[1] > 8] == [(4, 16, vit_layers.WIDTH), (1, 64, vit_layers.WIDTH)]
    rows = read(tmp_path / "vit.csv")
    assert [(row["settings"], row["MB"]) for row in rows] == [
        ("64 tokens, length 16", "2"),
        ("64 tokens, length 64", "2"),
    ]
    assert vit_report.of_memory(rows).splitlines()[-1] == "| 4 blocks | **2.0** | **2.0** | 1.000 |"


def test_the_first_calls_are_timed(tmp_path, monkeypatch):
    for name in ("AHOP_CACHE_DIR", "CUDA_CACHE_DISABLE"):
        monkeypatch.setenv(name, "")  # restored at the end
    monkeypatch.setattr(vit_layers, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(vit_layers, "CALLS", {"first call": 5, "another length": 7})
    vit.main(["--parts", "compile-time", "--attentions", "full", "--output", str(tmp_path / "vit.csv")])
    rows = read(tmp_path / "vit.csv")
    assert [(row["settings"], row["kernels"]) for row in rows] == [("length 5", "0"), ("length 7", "0")]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert vit_report.of_compile_time(rows).splitlines()[2].startswith("| full | 0.")


def test_candidates_take_turns():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = vit_layers.seconds_per_step(steps, "cpu", turns=2, least=0)
    assert "".join(calls) == "aaabbb" + "aabb" * 2  # a warm-up and an estimate, then turns of two steps
    assert set(times) == {"a", "b"}


def test_a_missing_package_and_unknown_attentions_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SystemExit, match=r"expected the package timm \(pip install timm\), got: .*timm"):
        vit.main([*SMALL, "--parts", "eager", "--output", str(tmp_path / "vit.csv")])
    with pytest.raises(SystemExit):
        vit.parse(["--attentions", "last 4"])
    expected = "expected attentions of one layer for the parts attention, memory, compile-time, got last 4"
    assert expected in capsys.readouterr().err
