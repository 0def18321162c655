"""Uses of Hopfield layers in published projects: the same losses as hflayers, after either switch."""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

import ahop_layers as ah
from benchmarks.projects import __main__ as command
from benchmarks.projects import cloob, measure
from benchmarks.projects.project import adaptive_layers, plain_layers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cloob, "DIM", 64)
    monkeypatch.setattr(cloob, "BATCH", 16)


@pytest.mark.parametrize("name", measure.PROJECTS)
def test_frozen_similarities_reproduce_the_losses_of_hflayers(name):
    figures = measure.measure(measure.project_named(name), 20)
    assert figures["difference_apart"] <= 1e-5
    assert figures["loss"] < 1.5 * figures["first_loss"] + 0.5  # training does not diverge
    if name in ("cloob", "hopular", "l2m", "hopcpt", "hop_vae"):  # no equal patterns with norms of their own
        assert figures["difference"] <= 1e-5


@pytest.mark.parametrize("name", measure.PROJECTS)
def test_every_use_runs_and_trains_its_similarity_after_a_switch(name):
    project = measure.project_named(name)
    with patch.dict("sys.modules"):
        ah.install_as_hflayers()
        layers = import_module("hflayers")
    training = measure.Training(project, layers)
    training.step(project.batch(torch.Generator().manual_seed(0)), 0)
    similarities = ah.similarity_parameters(training.model)
    assert similarities
    assert any(parameter.grad.abs().sum() > 0 for parameter in similarities)


@pytest.mark.parametrize("name", measure.PROJECTS)
def test_checkpoints_go_both_ways(name):
    project = measure.project_named(name)
    plain, adaptive = project.build(plain_layers()), project.build(adaptive_layers(project.blocks))
    adaptive.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(ah.hflayers_state_dict(adaptive), strict=True)


def test_the_command_writes_rows_and_prints_a_table(tmp_path, capsys):
    command.main(["--projects", "latch_sequence", "--steps", "2", "--results", str(tmp_path)])
    assert (tmp_path / "projects.csv").exists()
    assert "| hopfield-layers, latch sequences |" in capsys.readouterr().out
