"""Environments run here, in child processes with limits.

pool       the processes, kept warm from group to group
process    one of them: the parent's side
child      the process itself: it builds an environment and plays the episodes of a group side by side
"""

from services.rollout.environments.pool import EnvironmentProcesses

__all__ = ["EnvironmentProcesses"]
