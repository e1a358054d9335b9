"""Penstock: text in on a schedule; a registered, evaluated, reproducible language model out."""
