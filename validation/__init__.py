"""Is it true? What the simulator says, held against theory and measurements."""
