"""What Slurm's `srun` tells a task."""

# `srun -N3 -n5` in job 71, its first step, the second task of the second node.
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[01-02],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
