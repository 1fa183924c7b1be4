"""How far live and simulated runs are apart, and what a page says of it."""
