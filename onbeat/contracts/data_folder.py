"""The names in the root of a data folder that a local stack keeps for itself. What they name holds the password of
Redis."""

STATE_FILE, STATE_DRAFT, REDIS_FOLDER = "stack.json", "stack.new", "redis"
SECRET_NAMES = frozenset({STATE_FILE, STATE_DRAFT, REDIS_FOLDER})
