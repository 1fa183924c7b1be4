"""Where experts live: placements on the GPUs of a group."""
