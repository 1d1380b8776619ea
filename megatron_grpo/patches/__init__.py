"""The names of megatron-core, vLLM and torch that this project replaces at run time: docs/replacements.md lists them.

Nothing outside this package assigns to a name of another package (tests/unit/patches/test_foreign_names.py).
"""
