"""The old name of `onbeat.contracts.states` and `onbeat.contracts.records`."""

from onbeat.moved import names_from

__getattr__ = names_from("onbeat.types", "onbeat.contracts.states", "onbeat.contracts.records")
