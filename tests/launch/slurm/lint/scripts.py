"""Batch scripts without a fault: one with everything, and what users write."""

HEALTHY = """\
#!/bin/bash
#SBATCH --job-name=big
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
set -euo pipefail

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
code=0
srun --mpi=pmix --kill-on-bad-exit=1 hpctrain train my.toml || code=$?
if [ "$code" -eq 85 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


USERS = {
    "plain batch": """\
#!/bin/bash -l
#SBATCH -J test -N 2 --ntasks-per-node 4 -c 2
#SBATCH -t 1-00:00:00   # a day
#SBATCH -o %x.%j.out -e %x.%j.err
python -V
module purge
module load gcc/12 openmpi
source ~/venv/bin/activate
cd $SLURM_SUBMIT_DIR || exit 1
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --mpi=pmix_v4 -K -c $SLURM_CPUS_PER_TASK --cpu-bind=cores python train.py --lr 0.1
""",
    "options in a variable": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4 --cpus-per-task=4
OPTIONS="--mpi=pmix --kill-on-bad-exit=1"
OPTIONS+=" --cpus-per-task=$SLURM_CPUS_PER_TASK"
srun $OPTIONS --label python3 train.py
""",
    "options in an array": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4
launcher=(srun --mpi=pmix  # Open MPI
          --kill-on-bad-exit=1)
"${launcher[@]}" hpctrain train a.toml > log.txt 2>&1
""",
    "options nobody knows": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4 --cpus-per-task=3
source /opt/site/unknown.sh
srun $SITE_SRUN_OPTIONS python train.py
run() { srun "$@"; }
run --mpi=pmix -K ./a.out
""",
    "mpirun": """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
module load openmpi/4.1
mpirun -np $SLURM_NTASKS --map-by ppr:8:node:PE=4 python train.py
mpirun python train.py
""",
    "torchrun": """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun -K1 torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 --rdzv_endpoint $head:29500 train.py
""",
    "one process": """\
#!/bin/bash
#SBATCH --ntasks=1 --cpus-per-task=4 --gpus-per-node=1 --time=10
python prepare.py
srun hpctrain data verify data/train
srun python -c 'print(1)'
""",
    "care for the nodes": """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 mkdir -p $TMPDIR/data
srun --ntasks-per-node=1 tar xf data.tar -C /tmp
srun --ntasks-per-node=1 bash -c 'rm -rf /tmp/x && cp -r data /tmp/x'
sbcast train.tar /tmp/train.tar
srun hostname | sort | uniq -c
srun --mpi=pmix -K -c2 python train.py
""",
    "signal for the shell": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append
#SBATCH --signal=B:SIGUSR1@90
handler() {
  kill -USR1 "$pid"; wait "$pid"
  [[ $(cat count 2>/dev/null || echo 0) -lt 5 ]] || exit 0
  restarts=$((restarts + 1))
  if (( restarts < 5 )); then scontrol requeue $SLURM_JOB_ID; fi
}
trap handler SIGUSR1
srun --mpi=pmix -K python train.py & pid=$!
wait $pid
""",
    "an array over sizes": """\
#!/bin/bash
#SBATCH --array=0-3
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
for n in 1 2 4 8; do
  srun --mpi=pmix -K -n $n python bench.py > out.$n
done
case $1 in
  srun) srun --mpi=pmix -K ./a ;;
  mpirun) mpirun -n 16 ./a ;;
esac
cat > job.sh <<EOF
srun mpirun ./never
EOF
echo "use srun mpirun here" # srun mpirun
""",
    "GPUs by the task": """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
timeout 3600 srun --mpi=pmix -K --gpus-per-task=1 python train.py
""",
    "a container": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --export=ALL,SLURM_KILL_BAD_EXIT=1
srun --mpi=pmix apptainer exec --nv image.sif python train.py
""",
    "the shell makes way": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --signal=B:10@60
exec srun --mpi=pmix -K "$(command -v python)" train.py
""",
    "two kinds of nodes": """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=4
#SBATCH hetjob
#SBATCH --nodes=4 --ntasks=8 --cpus-per-task=9
srun --mpi=pmix -K ./a : ./b
""",
}
