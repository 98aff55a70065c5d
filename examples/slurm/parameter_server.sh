#!/bin/sh
#SBATCH --job-name=parameter-server
#SBATCH --ntasks=4
# One process per task: a coordinator, the parameter server and two trainers, on whichever nodes Slurm chooses.

set -eu

# Rank 0 runs on the first node, and hosts the store there. Another port for each job that may share that node.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

# A token for this job, in a file that only its owner can read, on a file system that all nodes share.
export GRADWIRE_TOKEN_FILE="$SLURM_SUBMIT_DIR/token-$SLURM_JOB_ID"
trap 'rm -f "$GRADWIRE_TOKEN_FILE"' EXIT
trap 'exit 143' HUP INT TERM   # so that the line above holds for a job that is cancelled, too
(umask 077; gradwire certs token > "$GRADWIRE_TOKEN_FILE")

# srun starts the tasks, and tells each its rank. When one fails, the others end too.
srun --kill-on-bad-exit=1 python examples/parameter_server.py --quiet "$@"
