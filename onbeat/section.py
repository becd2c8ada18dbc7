"""The old name of `onbeat.contracts.section`."""

from onbeat.moved import names_from

__getattr__ = names_from("onbeat.section", "onbeat.contracts.section")
