"""The choice of a model's passes, tried before anything is generated."""
