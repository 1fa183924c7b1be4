"""The control plane: a run of a cluster, and the SimPy processes that act on it from outside."""
