"""Adapted models and memories in the formats of transformers, timm and the hub, read again in another process."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frameworks import framework
from torch import nn

import ahop_layers as ah
from tests.samples import perturb, refuses

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install '.[save]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def trained(model):
    perturb(model)
    return model.eval()


def in_another_process(folder, code, x):
    """Returns ``output`` of code that sets it from ``x`` in a new process, in ``folder``."""
    torch.save(x, folder / "x.pt")
    lines = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]",
        "import torch, ahop_layers as ah; from frameworks import framework",
        "x = torch.load('x.pt')",
        code,
        "torch.save(output.detach(), 'output.pt')",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, check=True, capture_output=True)
    return torch.load(folder / "output.pt")


def tiny_vit(transformers):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    return transformers.ViTForImageClassification(config)


def test_a_model_of_transformers_returns_in_another_process(tmp_path):
    transformers = framework("transformers")
    model, x = tiny_vit(transformers), torch.randn(2, 3, 32, 32)
    ah.adapt_(model, blocks=4, debias=True, separation="entmax")
    optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-2, weight_decay=0.05))
    for _ in range(3):
        optimizer.zero_grad()
        model(x, labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
    ah.save_adapted(model.eval(), tmp_path / "model")
    code = "model = ah.load_adapted('model', framework('transformers').AutoModelForImageClassification)\n"
    output = in_another_process(tmp_path, code + "output = model(x).logits", x)
    torch.testing.assert_close(output, model(x).logits, atol=1e-6, rtol=0)
    original, keys = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not keys["unexpected_keys"]
    assert not keys["missing_keys"]
    ah.revert_(model)
    torch.testing.assert_close(original(x).logits, model(x).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [
    {"blocks": 2, "init": "uniform"},
    {"blocks": ah.Blocks(torch.arange(16) % 3, normalize=True)},
    {"bases": ("l1", ("near", 0.2)), "init": "l1", "separation": ah.Separation("entmax")},
    {"similarity": lambda dim, num_heads: ah.AdaptiveSimilarity(dim, num_heads, blocks=2)},
], ids=["number", "tensor", "quantile", "factory"])  # fmt: skip
def test_all_options_of_modules_that_an_example_found_return(options, tmp_path):
    transformers = framework("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model, x = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)), torch.arange(14).reshape(2, 7)
    ah.adapt_(model, example=x, last=1, **options)
    ah.save_adapted(trained(model), tmp_path)
    loaded = ah.load_adapted(tmp_path, transformers.BertModel)
    assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)
    assert repr(loaded) == repr(model)
    assert len(ah.revert_(loaded)) == 1


def test_a_model_of_timm_returns_from_its_checkpoint_in_another_process(tmp_path):
    timm = framework("timm")
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
    model, x = timm.create_model("vit_tiny_patch16_224", **sizes), torch.randn(2, 3, 32, 32)
    ah.adapt_(model, blocks=4, last=1)
    ah.save_adapted(trained(model), tmp_path)
    code = f"""
def build(**keywords):
    return framework("timm").create_model("vit_tiny_patch16_224", **{sizes}, **keywords).eval()
by_checkpoint = build(checkpoint_path="model.safetensors")
ah.adapt_(by_checkpoint, blocks=4, last=1)
ah.load_similarities(by_checkpoint, "similarities.safetensors")
output = torch.stack([by_checkpoint(x), ah.load_adapted(".", build)(x)])
"""
    output = in_another_process(tmp_path, code, x)
    torch.testing.assert_close(output, model(x).expand(2, -1, -1), atol=1e-6, rtol=0)


def test_models_and_memories_of_the_hub_return_from_a_folder(tmp_path):
    hub = framework("huggingface_hub")

    class Net(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, width=16):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x)

    net, x = Net(width=8), torch.randn(1, 5, 8)
    ah.adapt_(net, blocks=2)
    ah.save_adapted(trained(net), tmp_path / "net")
    assert torch.equal(ah.load_adapted(tmp_path / "net", Net)(x), net(x))

    from ahop_layers.convert.hub import HubMemory

    rows = torch.rand(50, 8)
    memory = HubMemory(rows, labels=["a", "b"] * 25, ids=range(50))
    memory.save_pretrained(tmp_path / "memory")
    code = "from ahop_layers.convert.hub import HubMemory\noutput = HubMemory.from_pretrained('memory').scores(x)"
    output = in_another_process(tmp_path, code, rows[:4] + 0.01)
    torch.testing.assert_close(output, memory.scores(rows[:4] + 0.01), atol=1e-6, rtol=0)
    assert HubMemory.from_pretrained(tmp_path / "memory").classify(rows[:2]) == ["a", "b"]


def test_a_model_that_was_built_adaptive_returns(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(4, 8), ah.AdaptiveHopfieldPooling(8, blocks=2), ah.AdaptiveAttention(8, 2))

    model = trained(build())
    ah.save_adapted(model, tmp_path)
    loaded = ah.load_adapted(tmp_path, build)
    assert all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))


def test_what_does_not_fit_is_refused(tmp_path):
    def build(width=8):
        return nn.Sequential(nn.MultiheadAttention(width, 2))

    refuses("must have similarities", ah.save_adapted, build(), tmp_path)
    refuses(r"save_adapted wrote, version 1, got no adapted\.json", ah.load_adapted, tmp_path, build)
    model = build()
    ah.adapt_(model, similarity=lambda dim, num_heads: nn.CosineSimilarity(-1))
    ah.save_adapted(model, tmp_path)
    refuses("0: similarity must be given", ah.load_adapted, tmp_path, build)
    with pytest.raises(ah.AHopError, match=r"0: the model must have the module .*Attention, got .*Attn"):
        ah.load_adapted(tmp_path, lambda: nn.Sequential(type("Attn", (nn.MultiheadAttention,), {})(8, 2)))


def test_no_weight_decay_names_the_similarities_until_they_are_reverted():
    timm = framework("timm")
    from timm.optim import create_optimizer_v2

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
    before = model.no_weight_decay()
    ah.adapt_(model)
    added = {f"blocks.0.attn.similarity.{name}" for name in ("w", "beta")}
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.no_weight_decay() == before | added
    optimizer = create_optimizer_v2(model, "adamw", lr=0.1, weight_decay=0.05)

    def decayed(groups):
        return {id(p) for group in groups if group["weight_decay"] for p in group["params"]}

    groups = ah.parameter_groups(model, lr=0.1, weight_decay=0.05)
    assert decayed(groups) == decayed(optimizer.param_groups)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    ah.revert_(model)
    assert model.no_weight_decay() == before
    assert "no_weight_decay" not in vars(model)
    model.no_weight_decay = own = lambda: {"cls_token"}
    ah.adapt_(model)
    assert model.no_weight_decay() == {"cls_token", *added}
    ah.revert_(model)
    assert model.no_weight_decay is own
