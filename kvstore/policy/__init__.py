"""Decisions as pure functions: no loop, no wire, no native code."""
