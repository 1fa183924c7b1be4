"""Files that launch the answer of a plan on real engines."""
