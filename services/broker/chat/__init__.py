"""The annex that takes chats by REST and hands them to rollouts; a broker works without it."""
