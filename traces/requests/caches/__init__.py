"""What prefix caches would find in requests: of any size, and under other evictions."""
