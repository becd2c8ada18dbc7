"""The model in training: loading, log-probabilities, adapters, shards, optimizer."""
