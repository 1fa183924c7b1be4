"""Many runs with one question: sweeps, what-ifs and capacity plans."""
