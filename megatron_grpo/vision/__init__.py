"""Images and videos in prompts: reading, preprocessing, places and positions in a sequence, the vision tower."""
