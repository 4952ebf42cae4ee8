"""Batch scripts without faults: one that passes every check, and typical scripts of users."""

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
timeout 3600 srun --mpi=pmix -K --gpus-per-task=1 --gpu-bind=none python train.py
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
    "Lightning below srun": """\
#!/bin/bash
#SBATCH --job-name=vit --nodes=2 --ntasks-per-node=4 --gres=gpu:a100:4 --cpus-per-task=16
#SBATCH --mem=0 --time=1-12:00:00 --mail-type=END --mail-user=me@example.org
#SBATCH --signal=SIGUSR1@90 --requeue --open-mode=append
#SBATCH --output=%x-%j.out
module load cuda/12.4 python/3.11
source venv/bin/activate
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export NCCL_DEBUG=INFO PYTHONFAULTHANDLER=1
srun --kill-on-bad-exit=1 --mpi=pmix python train.py --devices 4 --num_nodes $SLURM_NNODES
""",
    "DDP by srun": """\
#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4 -c 8 -t 2:00:00 -p gpu -A proj
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS
srun -K1 --mpi=pmix -c8 bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
python train.py --dist-url env://'
""",
    "accelerate on several nodes": """\
#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
export LAUNCH="accelerate launch --num_processes $((SLURM_NNODES * 8)) --main_process_ip $head"
srun -K1 bash -c "$LAUNCH --machine_rank \\$SLURM_PROCID train.py"
""",
    "a sweep of single GPUs": """\
#!/bin/bash
#SBATCH --array=1-20%4
#SBATCH --ntasks=1 --cpus-per-task=8 --gpus=1 --mem-per-cpu=4G --time=6:00:00
#SBATCH --output=%A_%a.out
eval "$(conda shell.bash hook)"
conda activate torch
lr=$(sed -n "${SLURM_ARRAY_TASK_ID}p" rates.txt)
python train.py --lr "$lr" --seed "$SLURM_ARRAY_TASK_ID"
""",
    "a whole node for one process": """\
#!/bin/bash
#SBATCH --nodes=1 --exclusive --mem=0 --time=30
export OMP_NUM_THREADS=64 OMP_PROC_BIND=close OMP_PLACES=cores
cd "$SLURM_SUBMIT_DIR/work" && python preprocess.py
""",
    "MPI and OpenMP": """\
#!/bin/bash
#SBATCH --nodes=8 --ntasks-per-node=2 --cpus-per-task=24 --hint=nomultithread --time=08:00:00
module purge; module load intel-oneapi-mpi
export OMP_NUM_THREADS=24 SLURM_CPU_BIND=cores SRUN_CPUS_PER_TASK=24
export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so
srun --mpi=pmi2 --kill-on-bad-exit=1 ./solver.x input.nml
""",
    "staging, and tidying up": """\
#!/bin/bash
#SBATCH -N1 -n4 --tmp=200G --mem=64G -t 04:00:00
set -e
work=$(mktemp -d "$TMPDIR/run.XXXX")
trap 'rsync -a "$work/out/" results/; rm -rf "$work"' EXIT
tar xf data.tar -C "$work"
srun --mpi=pmix -K ./train --data "$work" > log.txt
""",
    "a notebook": """\
#!/bin/bash
#SBATCH --ntasks=1 --cpus-per-task=4 --mem=16G --time=4:00:00 --output=jupyter-%j.log
port=$(shuf -i 8000-9999 -n 1)
echo "ssh -N -L $port:$(hostname):$port login"
jupyter lab --no-browser --ip=0.0.0.0 --port=$port
""",
    "jobs behind each other": """\
#!/bin/bash
#SBATCH --job-name=chain --nodes=2 --ntasks-per-node=2 --time=01:00:00 --dependency=singleton
[ -e finished ] || sbatch --dependency=afterany:$SLURM_JOB_ID "$0"
srun --mpi=pmix -K hpctrain train my.toml --resume
""",
    "containers by pyxis": """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --container-image=image.sqsh
#SBATCH --container-mounts=/data:/data
srun --mpi=pmix -K --container-image=torch.sqsh python -u /workspace/train.py --data /data
""",
}
