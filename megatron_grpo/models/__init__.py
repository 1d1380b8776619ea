"""The policy: megatron-core's GPT with our norm, packed attention and log-probability head."""
