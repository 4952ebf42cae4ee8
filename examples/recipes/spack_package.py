"""Spack package of hpctrain, with an MPI of Spack or of the system.

    spack repo create my-packages && mkdir my-packages/packages/py_hpctrain
    cp examples/recipes/spack_package.py my-packages/packages/py_hpctrain/package.py
    spack repo add my-packages
    spack external find openmpi
    spack install py-hpctrain

If Spack lacks a dependency, remove its line and `pip install` it into the environment. The
optional isal, for faster checksums, is omitted.

Checked by a test: the dependencies match the requirements of hpctrain. The package was not built.
"""

from spack.package import (
    PythonPackage,
    depends_on,
    license,  # noqa: A004 - the name that Spack gives
    version,
    when,
)


class PyHpctrain(PythonPackage):
    """Train PyTorch models across the nodes of a supercomputer, under plain mpirun or srun."""

    pypi = "hpctrain/hpctrain-1.0.0rc1.tar.gz"

    license("Apache-2.0")

    version("1.0.0rc1")

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
