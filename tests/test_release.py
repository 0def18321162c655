"""Releases: contents of sdist and wheel, one version everywhere, pinned actions."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from oldest import oldest

import ahop_layers as ah

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
IMPORT = r"^(?:import|from) (\w+)[\w.]*(?: import .*| as \w+|)$"
NAME = f"ahop_layers-{ah.__version__}"
MODULES = {str(path.relative_to(ROOT)) for path in (ROOT / "ahop_layers").rglob("*.py")}
SOURCES = {str(path.relative_to(ROOT)) for path in (ROOT / "ahop_layers").rglob("*.cu*")}  # compiled at first use


@pytest.fixture(scope="module")
def listed(tmp_path_factory) -> Path:
    """The folder of the metadata and the list of sources, from which setuptools builds sdist and wheel."""
    folder = tmp_path_factory.mktemp("listed")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return folder / "ahop_layers.egg-info"


@pytest.fixture
def metadata(listed) -> Message:
    return Parser().parsestr((listed / "PKG-INFO").read_text())


def test_every_module_and_everything_to_run_the_tests_is_packaged(listed):
    sources = {name.removeprefix("./") for name in (listed / "SOURCES.txt").read_text().splitlines()}
    assert {name for name in sources if re.fullmatch(r"ahop_layers/.*\.py", name)} == MODULES  # in packages
    wanted = """
        LICENSE README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md Makefile pyproject.toml setup.py constraints.txt
        ahop_layers/py.typed ahop_layers/ops/footprint.c ahop_layers/ops/footprint_impl.h tests/test_release.py
        ahop_layers/ops/gpu/cuda/attend.cu ahop_layers/ops/gpu/cuda/device.cuh tests/warp_emulator.h
        tests/data/hflayers.pt examples/demo.py .github/workflows/tests.yml benchmarks/kernels.py docs/mathematics.md
        docs/pictures/footprint.svg docs/notebooks/memory.ipynb
    """.split()  # noqa: SIM905 - reads better than quotes
    assert set(wanted) <= sources
    assert not [name for name in sources if re.search(r"\.(so|pyc|dylib)$|__pycache__|^out|^site", name)]


def test_the_package_requires_torch_and_einops_only(metadata):
    required = metadata.get_all("Requires-Dist")
    needed = [each for each in required if "extra ==" not in each]
    assert {re.match(r"[\w-]+", each)[0] for each in needed} == {"torch", "einops"}
    assert not [each for each in required if "@" in each]  # package registries reject direct references
    releases = dict(release.split("==") for release in oldest(required))
    assert {"torch", "einops", "lightning", "scikit-learn", "timm", "transformers", "torchmil"} <= releases.keys()
    assert not {"pytest", "ruff"} & releases.keys()


def test_examples_extra_has_every_import_of_the_examples(metadata):
    required = metadata.get_all("Requires-Dist")
    extra = {re.match(r"[\w-]+", each)[0] for each in required if re.search('extra == "(examples|serve)"', each)}
    text = "\n".join(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    used = {*re.findall(IMPORT, text, flags=re.MULTILINE)}
    used -= {*sys.stdlib_module_names, "examples", "ahop_layers", "torch", "einops", "numpy"}
    names = {"sklearn": "scikit-learn", "PIL": "pillow"}
    assert {names.get(module, module) for module in used} <= extra


def build(hook: str, folder: Path, out: Path) -> Path:
    """Calls a hook of the build backend, as ``python -m build --no-isolation`` does, and returns the file it built.

    With little optimization, which takes half the time to compile.
    """
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out)!r}))"
    environment = os.environ | {"AHOP_CFLAGS": "-O1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


@pytest.mark.full
def test_a_wheel_from_the_sdist_runs_its_kernel_elsewhere(tmp_path):
    """With the dependencies of this environment. A file that the sdist lacks fails the build."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    unwanted = ".git .venv* .*_cache .hypothesis build dist out site *.egg-info __pycache__".split()  # noqa: SIM905
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(*unwanted))  # a build writes into its tree
    with tarfile.open(build("build_sdist", tmp_path / "tree", tmp_path / "dist")) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("build_wheel", tmp_path / NAME, tmp_path / "dist")
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"{NAME}-py3-none-{here}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    kernel = {f"ahop_layers/{name}" for name in ("py.typed", "ops/_footprint.so")}
    assert {name for name in names if not name.startswith(f"{NAME}.dist-info/")} == MODULES | SOURCES | kernel
    assert f"{NAME}.dist-info/licenses/LICENSE" in names

    site = tmp_path / "installed"
    options = ["-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["test-command"]
    shown = ""
    for command in (*commands, "python -c 'import ahop_layers; print(ahop_layers.__file__)'"):
        run = [sys.executable, *shlex.split(command)[1:]]
        own = os.environ | {"PYTHONPATH": str(site)}
        shown += subprocess.run(run, cwd=tmp_path, env=own, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^cpu +(?!unavailable).*\n +ok: error", shown, flags=re.MULTILINE)
    assert Path(shown.splitlines()[-1]).is_relative_to(site)


def test_version_and_license_are_the_same_everywhere(metadata):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert metadata["Version"] == cited["version"] == ah.__version__
    assert metadata["License-Expression"] == cited["license"] == "MIT"
    latest = re.search(r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert latest[1] == ah.__version__


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflow_pins_its_actions(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more declares it
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^[ -]*(?:run: )?make ([\w-]+)", path.read_text(), re.MULTILINE)) <= set(targets)
    actions = re.findall(r"uses: (.+)", path.read_text())
    loose = [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action)]
    assert not loose, "pin the full commit hash, with the version in a comment"
