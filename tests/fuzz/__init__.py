"""Seeded fuzzers against a real daemon. Each is a program: `python -m tests.fuzz.NAME --help`."""
