"""Which experts tokens choose: the format of a routing trace, bit sets and statistics."""
