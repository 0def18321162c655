"""Uses of Hopfield layers in published projects: the same losses as hflayers, after either switch."""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

import ahop_layers as ah
from benchmarks.projects import __main__ as command
from benchmarks.projects import adaptive, cloob, measure, widths
from benchmarks.projects.project import adaptive_layers, plain_layers

pytestmark = pytest.mark.slow

# make test has a project with each layer, with static patterns and with a subclass; "static" is CLOOB of another size.
QUICK = ("bit_pattern", "cloob", "cpp_bag", "hop_vae", "l2m")
NAMES = [name for name in measure.PROJECTS if name != "static"]
PROJECTS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in NAMES]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cloob, "DIM", 64)
    monkeypatch.setattr(cloob, "BATCH", 16)


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
    with patch.dict("sys.modules"):
        ah.install_as_hflayers()
        layers = import_module("hflayers")
    training = measure.Training(project, layers)
    training.step(project.batch(torch.Generator().manual_seed(0)), 0)
    similarities = ah.similarity_parameters(training.model)
    assert similarities
    assert any(parameter.grad.abs().sum() > 0 for parameter in similarities)
    plain, adaptive = project.build(plain_layers()), project.build(adaptive_layers(project.blocks))
    adaptive.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(ah.hflayers_state_dict(adaptive), dict(plain.state_dict()), rtol=0, atol=0)


def test_the_command_measures_losses_accuracies_and_widths(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(widths, "WIDTHS", (16,))
    common = ["--projects", "latch_sequence", "--steps", "2", "--results", str(tmp_path)]
    for more, name, lines, shown in (
        ([], "projects", 1, "| hopfield-layers, latch sequences |"),
        (["--parts", "adaptive"], "projects_adaptive", 2 * len(adaptive.SYSTEMS), "latch sequences | 2 | 2 |"),
        (["--parts", "widths"], "projects_widths", 1, "| 16 |"),
    ):
        command.main([*common, "--seeds", "2", *more])
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1 + lines
        assert shown in capsys.readouterr().out
