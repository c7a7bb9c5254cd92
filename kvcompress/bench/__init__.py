"""Benchmarks: ratios of medians, the two sides alternating in one process. Nothing here is a test."""
