"""Parameter groups of similarities and of all other parameters."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers import hopfield
from tests.samples import Scaled, refuses


def model(**keywords):
    return nn.Sequential(nn.Linear(4, 8), ah.AdaptiveAttention(8, 2, **keywords), nn.LayerNorm(8))


def ids(parameters):
    return [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("keywords", [{"debias": True}, {"similarity": Scaled}], ids=["adaptive", "other"])
def test_similarity_parameters_have_their_own_group(keywords):
    layers = model(**keywords)
    rest, similarity = ah.parameter_groups(layers, lr=0.1, similarity_lr=0.01, weight_decay=0.5)
    assert ids(similarity["params"]) == ids(layers[1].similarity.parameters())
    assert sorted(ids(rest["params"] + similarity["params"])) == sorted(ids(layers.parameters()))
    assert (rest["lr"], rest["weight_decay"]) == (0.1, 0.5)
    assert (similarity["lr"], similarity["weight_decay"]) == (0.01, 0.0)


def test_similarities_have_the_same_learning_rate_and_no_weight_decay_by_default():
    layers, rate = model(), torch.tensor(0.1)
    assert all(group["lr"] is rate for group in ah.parameter_groups(layers, lr=rate))
    before = [parameter.clone() for parameter in layers.parameters()]
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(ah.parameter_groups(layers, lr=0.1, weight_decay=0.5)).step()
    similarity = ids(ah.similarity_parameters(layers))
    for parameter, old in zip(layers.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old if id(parameter) in similarity else 0.95 * old)


def trained(layers, optimizer, steps):
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        layers(x).square().sum().backward()
        optimizer.step()
    return deepcopy((layers.state_dict(), optimizer.state_dict()))


def hopfield_model(kind):
    return nn.Sequential(nn.Linear(8, 12), getattr(hopfield, kind)(12, num_heads=2), nn.Linear(12, 1))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_run_with_hflayers_is_resumed_with_the_state_of_its_optimizer(grouped):
    plain = hopfield_model("HopfieldPooling")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    weights, state = trained(plain, optimizer, 4)
    expected, _ = trained(plain, optimizer, 3)
    layers = hopfield_model("AdaptiveHopfieldPooling")
    layers.load_state_dict(weights)
    parameters = ah.parameter_groups(layers, lr=0.5) if grouped else layers.parameters()
    resumed = torch.optim.AdamW(parameters, lr=0.5)
    with pytest.raises(ValueError, match="parameter group"):
        resumed.load_state_dict(state)
    resumed.load_state_dict(ah.extended_optimizer_state(state, resumed, layers))
    assert [group["lr"] for group in resumed.param_groups] == [1e-2, 0.5][: 1 + grouped]
    similarity = ah.similarity_parameters(layers)
    for parameter in similarity:
        parameter.requires_grad_(False)
    found, own = trained(layers, resumed, 3)
    torch.testing.assert_close({name: found[name] for name in expected}, expected)
    for parameter in similarity:
        parameter.requires_grad_(True)
    trained(layers, resumed, 1)
    assert all(parameter in resumed.state for parameter in similarity)
    assert ah.extended_optimizer_state(own, resumed, layers) is own


def test_an_optimizer_state_of_other_groups_or_another_order_is_refused():
    plain, layers = hopfield_model("HopfieldPooling"), hopfield_model("AdaptiveHopfieldPooling")
    _, state = trained(plain, torch.optim.AdamW(plain.parameters()), 1)
    halves = torch.optim.AdamW([{"params": layers[:1].parameters()}, {"params": layers[1:].parameters()}])
    refuses("must have the groups of optimizer", ah.extended_optimizer_state, state, halves, layers)
    turned = torch.optim.AdamW(list(layers.parameters())[::-1])
    refuses("exp_avg of parameter 0 must be", ah.extended_optimizer_state, state, turned, layers)


@pytest.mark.full
def test_lightning_resumes_a_run_with_hflayers(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Model(lightning.LightningModule):
        def __init__(self, kind):
            super().__init__()
            self.layers = hopfield_model(kind)

        def training_step(self, batch):
            return self.layers(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(ah.parameter_groups(self, lr=1e-2))

        def on_load_checkpoint(self, checkpoint):
            states = checkpoint["optimizer_states"]
            states[0] = ah.extended_optimizer_state(states[0], self.configure_optimizers(), self)

    def run(kind, steps, path=None):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_steps=steps, logger=False, accelerator="cpu", **quiet)
        trainer.fit(Model(kind), torch.utils.data.DataLoader(torch.randn(8, 3, 8), 2), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return trainer.optimizers[0]

    run("HopfieldPooling", 2)
    for before, steps in ((2, 3), (3, 4)):
        optimizer = run("AdaptiveHopfieldPooling", steps, tmp_path / f"{before}.ckpt")
        counts = [{int(optimizer.state[p]["step"]) for p in group["params"]} for group in optimizer.param_groups]
        assert counts == [{steps}, {steps - 2}]


def test_a_model_without_similarity_has_one_group_and_a_shared_similarity_is_in_its_group_once():
    layer = nn.Linear(3, 3)
    (group,) = ah.parameter_groups(layer, lr=0.1, similarity_lr=1.0)
    assert ids(group["params"]) == ids(layer.parameters())
    similarity = ah.AdaptiveSimilarity(4, 2)
    layers = nn.Sequential(*(ah.AdaptiveAttention(8, 2, similarity=similarity) for _ in range(2)))
    assert ids(ah.parameter_groups(layers, lr=0.1)[1]["params"]) == ids(similarity.parameters())
    torch.optim.SGD(ah.parameter_groups(layers, lr=0.1))  # refuses a parameter in two groups
