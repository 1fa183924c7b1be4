"""Studies: figures of many runs, and claims that are held against them."""
