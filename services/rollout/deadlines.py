"""The durations that several parts of a rollout share. docs/operating.md has a table of them."""

LOAD_S = 120.0  # a child process has this long to start Python and to import a reward or environment
CANCEL_DEADLINE_S = 10.0  # an engine that does not end cancelled work within this time is left behind
FAREWELL_S = 5.0  # a rollout that ends has this long for each of its last messages: leases, its failure, its end
