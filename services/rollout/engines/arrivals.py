"""The old name of `onbeat.engines.arrivals`."""

from onbeat.moved import names_from

__getattr__ = names_from("services.rollout.engines.arrivals", "onbeat.engines.arrivals")
