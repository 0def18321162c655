"""Adapters of LoRA together with similarities: trained, saved by PEFT, and loaded into a fresh model."""

import pytest
import torch
from frameworks import framework
from test_pretrained import in_another_process, tiny_vit

import ahop_layers as ah

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_lora_and_similarities_train_and_return_in_another_process(tmp_path):
    transformers, peft = framework("transformers"), framework("peft")
    model = tiny_vit(transformers)
    model.save_pretrained(tmp_path / "base")
    ah.adapt_(model, blocks=4)
    saved = ["similarity", "classifier"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    model = peft.get_peft_model(model, config)
    x, labels = torch.randn(24, 3, 32, 32), torch.arange(24) % 3
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(30):
        loss = model(pixel_values=x, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    similarity = model.base_model.model.vit.layers[0].attention.similarity.modules_to_save["default"]
    assert not torch.equal(similarity.w, ah.AdaptiveSimilarity(16, 2, blocks=4).w)
    model.save_pretrained(tmp_path / "adapter")
    assert sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir()) < 2**20
    code = """
framework("transformers")
from peft import PeftModel
from transformers import ViTForImageClassification
model = ViTForImageClassification.from_pretrained("base")
ah.adapt_(model, blocks=4)
model = PeftModel.from_pretrained(model, "adapter").eval()
output = torch.stack([model(x).logits, model.merge_and_unload()(x).logits])
"""
    loaded, merged = in_another_process(tmp_path, code, x)
    torch.testing.assert_close(loaded, model.eval()(x).logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(merged, loaded, atol=1e-5, rtol=0)


def test_similarities_that_peft_does_not_save_are_pointed_out():
    transformers, peft = framework("transformers"), framework("peft")
    model = peft.get_peft_model(tiny_vit(transformers), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match=r"modules_to_save=\['similarity'\]"):
        ah.adapt_(model, blocks=4)
