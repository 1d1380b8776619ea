"""The parallel configuration of a run: process groups, context and sequence parallelism, and their flags and rules."""
