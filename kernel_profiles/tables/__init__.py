"""Latency tables: their format, the library that ships, and how far they are off."""
