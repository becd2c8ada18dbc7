"""Committed iterations as OpenTelemetry traces. Imported only when traces are exported: it needs OpenTelemetry's SDK.

tree        the trace of an iteration: the spans of services/broker/views/spans.py under the prompts that they belong to
exporter    which iterations are left, and the way to the collector
"""
