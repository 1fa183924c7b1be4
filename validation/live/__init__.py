"""Is it true of a live engine? vLLM is started, loaded, recorded, and simulated again."""
