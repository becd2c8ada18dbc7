"""Two small environments, a game of several turns and a tool: examples to read, which small models learn."""
