"""The durations that several parts of a trainer share. docs/operating.md has a table of them."""

FAREWELL_S = 5.0  # a trainer that ends has this long to give its lease back, and to report its end
