"""The explorer: one page that simulates what its controls say, while they are moved."""
