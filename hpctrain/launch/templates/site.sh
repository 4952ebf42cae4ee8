# shellcheck shell=bash
# Settings of your site. Every script of this folder reads this file when its job begins, or the
# file in HPCTRAIN_SITE. sbatch reads the SBATCH_ variables, so source this file before sbatch too:
#
#     source slurm/site.sh && sbatch --export=ALL,CONFIG=my.toml slurm/multi_node.sbatch
#
# Unchanged, jobs run in the environment of their submission. sites/lmod.sh and sites/spack.sh are
# complete examples.

# Partition and account; for sbatch, these variables have priority over the scripts.
#export SBATCH_PARTITION=compute
#export SBATCH_ACCOUNT=my-project

# The Python environment that contains hpctrain.
#source "$HOME/hpctrain-env/bin/activate"

# Value of `srun --mpi=` for your MPI; by default the result of `hpctrain doctor --pmi`.
#export MPI_TYPE=pmix

# Local storage of each node, to which staged_data.sbatch copies data.
#export LOCAL_DIR=/local/scratch
