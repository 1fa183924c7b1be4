"""Comparisons, paired over seeds."""
