"""Decides which stage results can be reused, and explains why the others cannot."""
