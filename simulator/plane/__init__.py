"""The data plane: the compiled event loop, and everything that happens between two wakes of the
control plane."""
