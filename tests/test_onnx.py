"""Adapted models, layers and memories in onnxruntime, and an adapted model that AOTInductor compiled."""

import pytest
import torch
from frameworks import framework
from test_pretrained import in_another_process, trained
from torch import nn

import ahop_layers as ah
from ahop_layers.ops import onnx, reference

pytestmark = pytest.mark.slow


class Search(nn.Module):
    """Searches a memory: exporters return tensors."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def forward(self, x):
        scores, indices = self.memory.search(x, k=5)
        return scores, indices


class Bags(nn.Module):
    """Pools packed bags."""

    def __init__(self, **options):
        super().__init__()
        self.pool = ah.AdaptiveHopfieldPooling(32, num_heads=4, **options)

    def forward(self, x, sizes):
        return self.pool.pool_packed(x, sizes)


BAGS = {"softmax": {}, "sparsemax": {"separation": "sparsemax"}, "zero": {"add_zero_association": True}}
BAG_SIZES = ({0: torch.export.Dim("total", min=2, max=4096)}, {0: torch.export.Dim("bags", min=2, max=512)})


def check(module, x, path, *more, **options):
    """Exports a module, runs it in onnxruntime, and compares the results; returns the names of the operators."""
    reason = "ONNX is not installed: pip install '.[onnx]'"
    pytest.importorskip("onnxscript", reason=reason)
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    with torch.no_grad():
        expected = module.eval()(x, *more)
    program = torch.onnx.export(module, (x, *more), str(path), **{"dynamo": True, "verbose": False, **options})
    session = runtime.InferenceSession(str(path))
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, {name: given.numpy() for name, given in zip(names, (x, *more), strict=True)})
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, want in zip(map(torch.from_numpy, found), expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, atol=1e-4 if want.is_floating_point() else 0, rtol=0)
    return session, program and {node.op_type for node in program.model.graph}


@pytest.mark.parametrize("blocks", [4, None])
def test_an_adapted_vision_transformer(blocks, tmp_path):
    model = framework("timm").create_model("vit_tiny_patch16_224", num_classes=10)
    ah.adapt_(model, blocks=blocks)
    assert "TopK" in check(trained(model), torch.randn(2, 3, 224, 224), tmp_path / "vit.onnx")[1]


@pytest.mark.parametrize("similarity", ["auto", "adaptive", "l1", "dis", "dot"])
def test_a_memory_of_a_thousand_patterns(similarity, tmp_path):
    patterns = torch.rand(1000, 64)
    queries = patterns[:8] + 0.1 * torch.randn(8, 64)
    check(Search(ah.AssociativeMemory(patterns, similarity)), queries, tmp_path / "memory.onnx")


LAYERS = {
    "pooling": lambda: ah.AdaptiveHopfieldPooling(32, num_heads=4),
    "steps": lambda: ah.AdaptiveHopfield(32, num_heads=4, update_steps_max=2, blocks=4),
    "normalized": lambda: ah.AdaptiveHopfield(32, num_heads=4, blocks=ah.Blocks(4, normalize=True)),
    "tensor": lambda: ah.AdaptiveHopfield(32, num_heads=4, blocks=torch.arange(8) % 3, separation="sparsemax"),
    "near": lambda: ah.AdaptiveHopfieldPooling(32, num_heads=4, bases=("l1", "near"), init="l1", debias=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, tmp_path):
    check(trained(LAYERS[name]()), torch.randn(3, 7, 32), tmp_path / "layer.onnx")


@pytest.mark.parametrize("name", BAGS)
def test_packed_bags(name, tmp_path):
    pool, x, sizes = trained(Bags(**BAGS[name])), torch.randn(12, 32), torch.tensor([3, 0, 9])
    check(pool, x, tmp_path / "bags.onnx", sizes, dynamic_shapes=BAG_SIZES)


@pytest.mark.parametrize("name", ["zero", pytest.param("sparsemax", marks=pytest.mark.full)])
def test_packed_bags_are_exported_by_operators_that_onnx_has(name, monkeypatch):
    import torch.onnx

    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    pool = trained(Bags(**BAGS[name]))
    with torch.no_grad():
        program = torch.export.export(pool, (torch.randn(12, 32), torch.tensor([3, 0, 9])), dynamic_shapes=BAG_SIZES)
    used = {str(node.target).partition(".")[2] for node in program.run_decompositions().graph.nodes}
    assert not used & {"repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "segment_reduce.default"}
    monkeypatch.undo()
    x, sizes = torch.randn(20, 32), torch.tensor([0, 5, 1, 14, 0])
    torch.testing.assert_close(program.module()(x, sizes), pool(x, sizes), atol=1e-5, rtol=0)


def test_sizes_may_be_dynamic_and_the_older_exporter_works(tmp_path):
    pool, x = trained(LAYERS["pooling"]()), torch.randn(5, 9, 32)
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("bag", min=2, max=512)}
    session, _ = check(pool, torch.randn(3, 7, 32), tmp_path / "pool.onnx", dynamic_shapes=(sizes,))
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), pool(x).detach(), atol=1e-4, rtol=0)
    with pytest.warns(DeprecationWarning, match="legacy"):
        check(pool, x, tmp_path / "older.onnx", dynamo=False)


@pytest.mark.parametrize("blocks", [8, 4, torch.arange(8) % 3], ids=["full", "blocks", "tensor"])
def test_standard_operators_compute_the_reference(blocks):
    query, key = torch.randn(2, 3, 5, 8) + 10, torch.randn(2, 3, 6, 8) + 10
    n, numbers = reference.check_blocks(blocks, query)
    weight, widths = torch.randn(3, 4, n), torch.tensor([1.0, 1.0, 1.0, 0.5])
    bases = ("dis", "dot", "l1", "near")
    expected = reference.adaptive_similarity(*(x.double() for x in (query, key, weight)), bases, numbers, widths)
    folded, products = reference.fold(weight), ("dot", "dis")
    scores = reference.folded_similarity(query, key, folded, bases, widths, numbers, products)
    torch.testing.assert_close(scores, expected.float(), atol=1e-3, rtol=1e-5)
    assert not onnx.is_onnx_export()


def test_other_exports_keep_the_operator():
    """Also after torch.onnx is imported: it is asked only while it exports."""
    import torch.onnx

    layer, x = LAYERS["pooling"]().eval(), torch.randn(2, 5, 32)
    graph = torch.export.export(layer, (x,)).graph
    assert torch.ops.ahop.score.default in {node.target for node in graph.nodes}


@pytest.mark.full
def test_an_adapted_model_that_aotinductor_compiled_runs_in_another_process(tmp_path):
    sizes = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 5}
    model, x = framework("timm").create_model("vit_tiny_patch16_224", **sizes), torch.randn(2, 3, 32, 32)
    ah.adapt_(model, blocks=4)
    exported = torch.export.export(trained(model), (x,))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    output = in_another_process(tmp_path, "output = torch._inductor.aoti_load_package('model.pt2')(x)", x)
    torch.testing.assert_close(output, model(x), atol=1e-5, rtol=0)
