"""The old name of `onbeat.engines`."""

from onbeat.moved import names_from

__getattr__ = names_from("services.rollout.engines.interface", "onbeat.engines")
