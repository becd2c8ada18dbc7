"""The way from a conversation to token ids, for trainer and rollouts: tokenizer, chat template, control tokens."""
