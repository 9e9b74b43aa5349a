"""Edges: how engines and tools reach the store."""
