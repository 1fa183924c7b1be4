"""What the simulator says of a recorded run."""
