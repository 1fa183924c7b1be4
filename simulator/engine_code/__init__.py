"""An engine's own scheduler in place of the reference model's, on the simulator's clock."""
