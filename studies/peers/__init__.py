"""Other simulators on the published runs."""
