"""The ledger of a run: finished groups and batches on disk before they count; resume and replay from it."""
