"""Spack package of hpctrain, for Spack 1.0 or later, with an MPI of Spack or of the system.

Run these commands in a clone of hpctrain; nothing is on a package index yet:

    spack repo create my-packages && cd my-packages/spack_repo/my_packages
    mkdir packages/py_hpctrain
    cp PATH/TO/spack_package.py packages/py_hpctrain/package.py
    spack repo add . && cd -
    spack external find openmpi
    spack dev-build py-hpctrain@1.0.0rc1
    spack load py-hpctrain && hpctrain doctor

The optional isal, for faster checksums, is omitted.

Checked by a test: the dependencies match the requirements of hpctrain. The package repository of
Spack (July 2026) has all of them in these versions. A development version of Spack 0.23 installed
this package, without the dependency on C, which it does not know, and with all other dependencies
as externals in an environment of pip. Not installed by Spack 1.0 or later.
"""

from spack.package import (
    depends_on,
    license,  # noqa: A004 - the name that Spack gives
    version,
    when,
)
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpctrain(PythonPackage):
    """Train PyTorch models across the nodes of a supercomputer, under plain mpirun or srun."""

    pypi = "hpctrain/hpctrain-1.0.0rc1.tar.gz"

    license("Apache-2.0")

    version("1.0.0rc1")

    depends_on("c", type="build")
    depends_on("python@3.10:3.13", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-h5py@3.10:3", type=("build", "run"))
    depends_on("py-mpi4py@4.1:4", type=("build", "run"))
    depends_on("py-numpy@1.26:2", type=("build", "run"))
    depends_on("py-rich@14.0:", type=("build", "run"))
    depends_on("py-safetensors@0.6:", type=("build", "run"))
    # The package of PyPI wraps this program; Spack has the program itself.
    depends_on("shellcheck@0.10:", type=("build", "run"))
    depends_on("py-torch@2.6:", type=("build", "run"))
    depends_on("py-typer@0.20:", type=("build", "run"))
    depends_on("py-typing-extensions@4.10:", type=("build", "run"))
    with when("^python@:3.10"):
        depends_on("py-tomli@2.0:", type=("build", "run"))
