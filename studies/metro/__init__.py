"""METRO: which replica computes, by activated experts."""
