"""What every process needs: settings, logging, probes, an event loop in a thread, limits, temporary folders, keys."""
