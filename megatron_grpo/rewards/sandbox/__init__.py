"""Isolated execution of generated code."""
