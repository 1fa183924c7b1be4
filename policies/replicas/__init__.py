"""Which copy of an expert computes a token."""
