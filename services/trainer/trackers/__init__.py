"""Curves of a job where people look at them: TensorBoard files always, W&B, MLflow and Trackio when the job asks.

The ledger holds all numbers; a tracker is a reader of it that keeps up (`follow`). The training loop knows nothing of
trackers and never waits for one.
"""
