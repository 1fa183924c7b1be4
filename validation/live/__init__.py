"""Validation against live engines: vLLM is started, loaded and recorded, then simulated."""
