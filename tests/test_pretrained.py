"""Adapted models in the formats of transformers and with the optimizers of timm."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frameworks import framework

import ahop_layers as ah
from tests.samples import perturb

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


def test_a_model_of_transformers_returns_from_its_folder(tmp_path):
    transformers = framework("transformers")
    model, x = tiny_vit(transformers), torch.randn(2, 3, 32, 32)
    ah.adapt_(model, blocks=4, debias=True, separation="entmax")
    optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr=1e-2, weight_decay=0.05))
    for _ in range(3):
        optimizer.zero_grad()
        model(x, labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path / "model")
    ah.save_similarities(model, tmp_path / "similarities")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    ah.adapt_(loaded, blocks=4, debias=True, separation="entmax")
    ah.load_similarities(loaded, tmp_path / "similarities")
    torch.testing.assert_close(loaded(x).logits, model(x).logits, atol=1e-6, rtol=0)


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
