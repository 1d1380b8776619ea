"""Inference servers over HTTP, whatever their kind."""
