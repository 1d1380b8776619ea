"""verl's reward function for the benchmark: values that differ between completions of a random model."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Return the share of characters with an even code point."""
    return sum(ord(letter) % 2 == 0 for letter in solution_str) / max(len(solution_str), 1)
