"""Which request has which KV blocks: caches of workers, tiers beside them, and what a step
takes."""
