"""The model card template: valid metadata, and code that loads a checkpoint."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from frameworks import framework

import ahop_layers as ah

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[1] / "docs"


def test_the_model_card_is_valid_and_its_code_loads_the_similarities(tmp_path, monkeypatch):
    card = re.search(r"````markdown\n(.*?)````", (DOCS / "model-card.md").read_text(), flags=re.DOTALL)[1]
    _, head, body = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["library_name"] == "ahop-layers"
    assert {"license", "pipeline_tag", "base_model", "base_model_relation", "datasets", "metrics"} <= fields.keys()
    timm = framework("timm")
    create = timm.create_model
    trained = create("vit_tiny_patch16_224")
    ah.adapt_(trained, blocks=4)
    for parameter in ah.similarity_parameters(trained):
        torch.nn.init.normal_(parameter)
    ah.save_similarities(trained, tmp_path / "similarities.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))  # without a download
    namespace: dict[str, object] = {}
    exec(re.search(r"~~~python\n(.*?)~~~", body, flags=re.DOTALL)[1], namespace)
    loaded = ah.similarity_parameters(namespace["model"])
    assert loaded
    assert all(torch.equal(one, two) for one, two in zip(loaded, ah.similarity_parameters(trained), strict=True))
