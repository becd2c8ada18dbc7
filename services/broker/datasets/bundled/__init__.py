"""The data that come with Onbeat: `bundled:NAME` in `data.path`."""
