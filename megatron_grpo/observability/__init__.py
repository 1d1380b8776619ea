"""What a run reports: metrics, trackers, completions, provenance, profiles."""
