"""Reward models: sequence classifiers and generative judges."""
