"""What a user declares of a run, and how it is spelled."""
