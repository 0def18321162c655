"""Uses of Hopfield layers in published projects: the same losses as hflayers, after either switch."""

import sys
from importlib import import_module
from unittest.mock import patch

import pytest
import torch

import ahop_layers as ah
from benchmarks.projects import __main__ as command
from benchmarks.projects import adaptive, cloob, measure
from benchmarks.projects.project import adaptive_layers, plain_layers

pytestmark = pytest.mark.slow

# make test has a project with each layer, with static patterns and with a subclass; "static" is CLOOB of another size.
QUICK = ("bit_pattern", "cloob", "cpp_bag", "denoising", "hop_vae", "hyper_pcm", "l2m")
NAMES = [name for name in measure.PROJECTS if name != "static"]
PROJECTS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in NAMES]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cloob, "DIM", 64)
    monkeypatch.setattr(cloob, "BATCH", 16)


def installed():
    """What a project that is not edited finds as hflayers."""
    with patch.dict("sys.modules"):
        ah.install_as_hflayers()
        return import_module("hflayers")


@pytest.mark.parametrize("name", PROJECTS)
def test_frozen_similarities_reproduce_the_losses_of_hflayers(name):
    figures = measure.measure(measure.project_named(name), 4)
    assert figures["difference_apart"] <= 1e-5
    assert figures["loss"] < 3 * figures["first_loss"] + 5  # training does not diverge; a loss of one bag varies
    if name in ("cloob", "hopular", "l2m", "hopcpt", "hop_vae"):  # no equal patterns with norms of their own
        assert figures["difference"] <= 1e-5


@pytest.mark.parametrize("name", PROJECTS)
def test_every_use_trains_its_similarity_after_a_switch_and_checkpoints_go_both_ways(name):
    project = measure.project_named(name)
    training = measure.Training(project, installed())
    training.step(project.batch(torch.Generator().manual_seed(0)), 0)
    similarities = ah.similarity_parameters(training.model)
    assert similarities
    trained = any(parameter.grad.abs().sum() > 0 for parameter in similarities)
    assert trained == (name != "denoising")  # the weight of a single pattern is always 1
    plain, adaptive = project.build(plain_layers()), project.build(adaptive_layers(project.blocks))
    adaptive.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(ah.hflayers_state_dict(adaptive), dict(plain.state_dict()), rtol=0, atol=0)


def test_layers_that_are_built_in_the_training_loop_train_an_encoder_as_hflayers_does():
    """CLOOME builds CLOOB's layer anew in each epoch: its similarity is in no optimizer."""
    losses = []
    for layers in (plain_layers(), installed()):
        torch.manual_seed(0)
        model = cloob.Pairs(layers)
        optimizer = torch.optim.AdamW([*model.image.parameters(), *model.text.parameters()], lr=1e-3)
        for epoch in range(3):
            model.hopfield = cloob.Pairs(layers).hopfield
            optimizer.zero_grad()
            loss = cloob.loss(model, cloob.batch(torch.Generator().manual_seed(epoch)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-5)


def test_stored_patterns_may_be_assigned_after_construction():
    torch.manual_seed(0)
    bank, x = torch.randn(1, 50, 16), torch.randn(4, 3, 16)
    states, outputs = [], []
    for layers in (plain_layers(), installed()):
        torch.manual_seed(1)
        layer = layers.HopfieldLayer(input_size=16, num_heads=2, quantity=50, trainable=False)
        layer.lookup_weights = torch.nn.Parameter(bank, requires_grad=False)
        outputs.append(layer(x))
        states.append(layer.state_dict())
    torch.testing.assert_close(*outputs)
    assert not layer.lookup_weights.requires_grad
    assert torch.equal(states[1]["lookup_weights"], bank)
    layer.load_state_dict(states[0], strict=True)


def test_the_baseline_is_hflayers_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "hflayers.py").write_text("Hopfield = HopfieldLayer = HopfieldPooling = int")
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict("sys.modules"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "hflayers"]:
            del sys.modules[name]
        assert plain_layers().HopfieldLayer is int


def test_the_command_measures_losses_and_accuracies(tmp_path, capsys):
    common = ["--projects", "latch_sequence", "--steps", "2", "--results", str(tmp_path)]
    for more, name, lines, shown in (
        ([], "projects", 1, "| hopfield-layers, latch sequences |"),
        (["--parts", "adaptive"], "projects_adaptive", 2 * len(adaptive.SYSTEMS), "latch sequences | 2 | 2 |"),
    ):
        command.main([*common, "--seeds", "2", *more])
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1 + lines
        assert shown in capsys.readouterr().out
