"""The policy model: megatron-core's GPT with a norm, packed attention and a log-probability head of this package."""
