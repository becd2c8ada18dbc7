"""The views of a job that REST gives, built from the ledger. Nothing here writes.

records     jobs, weights and samples
groups      one group, token by token
spans       who did what in an iteration, when; also for traces
timeline    the spans of the last iterations, by process
live        the messages to those who watch a job
"""
