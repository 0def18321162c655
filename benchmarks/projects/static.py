"""Static patterns of a common size: the model and loss of CLOOB with 256 dimensions."""

from functools import partial

from benchmarks.projects.cloob import Pairs, batch, loss
from benchmarks.projects.project import Project

PROJECT = Project("static `Hopfield`, 256 x 256 patterns of 256 dimensions", partial(Pairs, dim=256), batch, loss)
