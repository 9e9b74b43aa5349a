"""Benchmarks: one script per question, results in bench/results, figures in README made from those."""
