"""Errors, the CPU layer, megatron-core's settings as flags, batch sizes and HTTP: what every other package may use."""
