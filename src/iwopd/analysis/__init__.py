"""Comparison of results, the position-bias probe, and the reproduction of the paper."""
