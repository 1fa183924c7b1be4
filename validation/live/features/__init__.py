"""What an engine's features do, live and simulated."""
