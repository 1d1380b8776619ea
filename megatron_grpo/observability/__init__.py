"""Output of a run: metrics, trackers, completions, provenance, profiles."""
