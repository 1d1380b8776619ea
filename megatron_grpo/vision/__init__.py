"""Images in prompts: reading and preprocessing, their places and positions in a sequence, the vision tower."""
