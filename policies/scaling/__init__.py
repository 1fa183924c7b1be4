"""How many workers? Decisions over what an autoscaler may see of each pool."""
