"""Committed iterations as OpenTelemetry traces.

exporter    which iterations are left, and what became of them
tree        the trace of an iteration: the spans of services/broker/views/spans.py under the prompts that they belong to
steps       when the trainer worked on each group
collector   the way to a collector, the only module that imports OpenTelemetry
"""
