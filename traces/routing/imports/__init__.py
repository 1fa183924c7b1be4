"""Routing that other tools recorded, read into a routing trace."""
