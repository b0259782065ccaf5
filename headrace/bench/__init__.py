"""Measurements of speed, their results as files, and comparisons of them."""
