"""The annex that answers chats with the served policy; a rollout works without it."""
