"""The weights that rollouts pull: held versions, their server, and which rollout pulls from which."""
