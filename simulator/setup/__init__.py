"""How a configuration becomes a cluster: what is read, checked and laid out before a run."""
