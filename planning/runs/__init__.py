"""Many runs: points on processes or on Ray, sweeps, and trials of clusters."""
