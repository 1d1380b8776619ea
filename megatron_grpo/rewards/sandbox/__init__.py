"""Runs generated code where it can do no harm."""
