"""The basics of every process: settings, logging, probes, event loop, limits, temporary folders, API keys."""
