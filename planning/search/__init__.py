"""Searches: the cheapest cluster, the highest rate, the best split."""
