"""The environment variables that make a process a rank of a job."""

RANK_VARIABLES = (
    *("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT"),
    *("MS_TOPO_TIMEOUT", "MS_SIMULATION_LEVEL", "MS_ENABLE_RECOVERY"),
    *("RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "DEVICE_ID"),
    *("MS_SERVER_NUM", "MS_LOCAL_WORKER", "MS_NODE_RANK"),  # of ascend-operator
)
