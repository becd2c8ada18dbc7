"""Names in a data folder. Those in its root, which a local stack keeps for itself, name what holds the password of
Redis."""

STATE_FILE, STATE_DRAFT, REDIS_FOLDER = "stack.json", "stack.new", "redis"
JOB_FILE = "onbeat_job.json"  # file of a checkpoint: {"id": its job, "config": the job as the trainer saw it}
SECRET_NAMES = frozenset({STATE_FILE, STATE_DRAFT, REDIS_FOLDER})
