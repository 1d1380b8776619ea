"""Prompts in, flat rollout batches out: tokenizers, prompt files, the sampler, batches and their packing."""
