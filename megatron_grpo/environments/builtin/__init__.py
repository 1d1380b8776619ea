"""Environments that the project has."""
