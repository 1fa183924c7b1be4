"""Which KV blocks are whose: caches of workers, tiers beside them, and what a step takes."""
