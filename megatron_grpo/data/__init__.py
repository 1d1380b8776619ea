"""The data path: tokenizers, prompt files, the prompt sampler, rollout batches and their packing."""
