# shellcheck shell=bash
# A site with Spack, and a Spack environment that contains Python and an MPI library for Slurm:
#
#     spack env create hpctrain
#     spack -e hpctrain add 'python@3.11:' 'mpich pmi=pmi2 +slurm' && spack -e hpctrain install
#
# and a virtual environment that uses them, which you create once:
#
#     spack env activate hpctrain && python3 -m venv "$HOME/hpctrain-env"
#     "$HOME/hpctrain-env/bin/pip" install hpctrain
export SBATCH_PARTITION=batch

# shellcheck source=/dev/null
source "${SPACK_ROOT:-$HOME/spack}/share/spack/setup-env.sh"
spack env activate hpctrain
# shellcheck source=/dev/null
source "$HOME/hpctrain-env/bin/activate"
mpi=$(spack location -i mpich)
export MPI4PY_LIBMPI=$mpi/lib/libmpi.so
export PATH=$mpi/bin:$PATH

export LOCAL_DIR=/tmp
