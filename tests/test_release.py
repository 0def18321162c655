"""Releases: contents of sdist and wheel, one version everywhere, valid workflows with pinned actions."""

import ast
import io
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
NAME = f"ahop_layers-{ah.__version__}"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def build(hook: str, folder: Path, out: Path) -> Path:
    """Call a hook of the build backend, as ``python -m build --no-isolation`` does, and return the file it built.

    With little optimization, which takes half the time to compile.
    """
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out)!r}))"
    environment = os.environ | {"AHOP_CFLAGS": "-O1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from a copy, so that the build writes nothing into the checkout."""
    copy = tmp_path_factory.mktemp("sdist") / "tree"
    unwanted = shutil.ignore_patterns(
        ".git", ".venv*", ".*_cache", ".hypothesis", "build", "dist", "out", "site", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return build("build_sdist", copy, copy.parent / "dist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, so that a file missing there fails the build."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("build_wheel", folder / NAME, folder / "dist")


def test_sdist_has_everything_to_run_the_tests(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    wanted = """
        LICENSE README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md Makefile pyproject.toml setup.py constraints.txt
        ahop_layers/py.typed ahop_layers/ops/footprint.c ahop_layers/ops/footprint_impl.h tests/test_release.py
        tests/data/hflayers.pt examples/demo.py .github/workflows/tests.yml benchmarks/kernels.py docs/mathematics.md
        docs/pictures/footprint.svg docs/notebooks/vit.ipynb
    """.split()  # noqa: SIM905 - reads better than quotes
    assert set(wanted) <= names
    assert not [name for name in names if re.search(r"\.(so|pyc|dylib)$|__pycache__|^out|^site", name)]


def test_wheel_contains_the_package_and_its_kernel_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"{NAME}-py3-none-{here}.whl"
    package = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    modules = {f"ahop_layers/{path.relative_to(ROOT / 'ahop_layers')}" for path in (ROOT / "ahop_layers").rglob("*.py")}
    assert package == modules | {
        "ahop_layers/py.typed",
        "ahop_layers/ops/_footprint.so",
        "ahop_layers/ops/_footprint.json",
    }
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def metadata(wheel: Path) -> Message:
    """The core metadata of a wheel."""
    return Parser().parse(io.StringIO(zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA").decode()))


def test_wheel_requires_torch_and_einops_only(wheel):
    fields = metadata(wheel)
    assert (fields["Name"], fields["Version"]) == ("ahop-layers", ah.__version__)
    assert fields["License-Expression"] == "MIT"
    needed = [each for each in fields.get_all("Requires-Dist") if "extra ==" not in each]
    assert {re.match(r"[\w-]+", each)[0] for each in needed} == {"torch", "einops"}
    assert not [each for each in fields.get_all("Requires-Dist") if "@" in each]  # PyPI rejects direct references


def test_examples_extra_has_every_import_of_the_examples(wheel):
    required = metadata(wheel).get_all("Requires-Dist")
    extra = {re.match(r"[\w-]+", each)[0] for each in required if 'extra == "examples"' in each}
    paths = list((ROOT / "examples").rglob("*.py"))
    used = {"mlxtend"}  # looked for, not imported
    for statement in (each for path in paths for each in ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            used |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            used.add(statement.module.partition(".")[0])
    used -= {*sys.stdlib_module_names, "examples", "benchmarks", "ahop_layers", "torch", "einops", "numpy"}
    names = {"sklearn": "scikit-learn", "PIL": "pillow"}
    assert {names.get(module, module) for module in used} <= extra


def test_oldest_releases_are_the_lower_bounds_of_the_user_extras(wheel):
    releases = dict(release.split("==") for release in oldest(metadata(wheel).get_all("Requires-Dist")))
    assert {"torch", "einops", "lightning", "scikit-learn", "timm", "transformers", "torchmil"} <= releases.keys()
    assert not {"pytest", "ruff", "triton"} & releases.keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test", "demo", "docs", "test-hflayers"])
def test_old_python_fails_before_anything_is_installed(target, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old"
    pretend = "import sys; sys.version_info, sys.version = (3, 10, 4), '3.10.4 (main)'; exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$@"\n')
    old.chmod(0o755)
    command = ["make", target, f"PYTHON={old}"]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "expected Python 3.11 or newer for the versions of constraints.txt, got 3.10.4;" in done.stderr
    assert not list(tmp_path.glob(".venv*"))


def test_installed_wheel_runs_its_kernel(wheel, tmp_path):
    """Outside the checkout, with the dependencies of this environment."""
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    environment = os.environ | {"PYTHONPATH": str(site)}

    # As python -m ahop_layers, after the path of the package.
    code = (
        "import runpy, ahop_layers; print(ahop_layers.__file__); runpy.run_module('ahop_layers', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(shown.splitlines()[0]).is_relative_to(site)
    assert re.search(r"^cpu +(?!unavailable).*\n +ok: error", shown, flags=re.MULTILINE)


def test_the_citation_has_the_required_fields():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["type"] == "software"
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors", "year", "conference"} <= paper.keys()
    assert all(each.keys() == {"family-names", "given-names"} for each in paper["authors"])


def test_keywords_and_license_are_those_of_the_citation(wheel):
    cited, built = yaml.safe_load((ROOT / "CITATION.cff").read_text()), metadata(wheel)
    assert built["License-Expression"] == cited["license"]
    keywords = {word.lower() for word in built["Keywords"].split(",")}
    assert {word.lower().replace("hopfield network", "hopfield") for word in cited["keywords"]} <= {
        word.replace("hopfield network", "hopfield") for word in keywords
    }
    assert not [line for line in built.get_all("Classifier") if line.startswith("License ::")]  # SPDX replaces it


def test_version_is_the_same_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == ah.__version__
    first = re.search(
        r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d|unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert first[1] == ah.__version__
    written = [
        path.name
        for path in (*ROOT.glob("*.toml"), ROOT / "setup.py", *(ROOT / "ahop_layers").rglob("*.py"))
        if re.search(rf"""version.*["']{re.escape(ah.__version__)}["']""", path.read_text())
    ]
    assert written == ["version.py"]


def test_changelog_names_every_public_name():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert not [name for name in ah.__all__ if f"`{name}" not in text]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_well_formed(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more declares it
    assert workflow[True]  # YAML reads the key "on" as a boolean
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(workflow["jobs"]), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            target = re.fullmatch(r"make ([\w-]+)", step.get("run", ""))
            assert not target or target[1] in targets, step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path):
    actions = re.findall(r"uses: (.+)", path.read_text())
    loose = [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action)]
    assert not loose, "pin the full commit hash, with the version in a comment"


def test_scheduled_workflow_runs_torch_nightly_and_pip_audit():
    workflows = [yaml.safe_load(path.read_text()) for path in WORKFLOWS]
    jobs = [job for workflow in workflows if "schedule" in workflow[True] for job in workflow["jobs"].values()]
    commands = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    assert "make test-nightly" in commands
    assert re.search(r"pip-audit==\S+ .*-r constraints\.txt", commands)


def test_wheel_test_command_finds_the_kernel():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    command = shlex.split(config["test-command"][-1])  # test_installed_wheel_runs_its_kernel runs the first
    assert subprocess.run([sys.executable, *command[1:]], check=False).returncode == 0
