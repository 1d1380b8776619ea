"""Shared by all packages: errors, the CPU layer, megatron-core's settings as flags, batch sizes, an HTTP client."""
