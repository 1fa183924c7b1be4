"""Which of the five papers' methods combine: all together, and each without the others."""
