"""The models that only answer with log-probabilities: reference and teacher."""
