"""Which waiting request an engine serves next."""
