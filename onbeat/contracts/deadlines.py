"""The durations on which services and clients must agree. docs/operating.md has a table of them."""

HEARTBEAT_S = 2.0  # a trainer or rollout sends a heartbeat this often
SILENT_S = 10.0  # a trainer or rollout counts as dead after this long without a heartbeat
STARTING_S = 120.0  # a trainer or rollout that announced its start, and has not sent a heartbeat since, is dead then
STREAM_HEARTBEAT_S = 15.0  # a broker that has nothing to send on a job's stream sends a sign of life this often
STREAM_SILENCE_S = 3 * STREAM_HEARTBEAT_S  # a client takes a job's stream for broken after this long without a byte
