"""Predictions of runs that others published."""
