"""The old name of `onbeat.contracts.errors`."""

from onbeat.moved import names_from

__getattr__ = names_from("onbeat.errors", "onbeat.contracts.errors")
