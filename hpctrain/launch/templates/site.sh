# shellcheck shell=bash
# What is particular to your site. Every script of this folder reads this file when its job begins;
# HPCTRAIN_SITE names another one. To let the SBATCH_ variables count, read it before sbatch too:
#
#     source slurm/site.sh && sbatch --export=ALL,CONFIG=my.toml slurm/multi_node.sbatch
#
# As it is, jobs run in the environment in which they were submitted. sites/lmod.sh and
# sites/spack.sh are examples of more.

# Where, and on whose account: sbatch takes these over what the scripts say.
#export SBATCH_PARTITION=compute
#export SBATCH_ACCOUNT=my-project

# The environment with hpctrain in it.
#source "$HOME/hpctrain-env/bin/activate"

# What srun calls the interface of your MPI, if `hpctrain doctor --pmi` should not look it up.
#export MPI_TYPE=pmix

# Storage of each node: staged_data.sbatch copies there.
#export LOCAL_DIR=/local/scratch
