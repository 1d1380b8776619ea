"""Reference model and teacher: models that only compute log-probabilities."""
