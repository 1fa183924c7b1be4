"""Which worker serves a request: prefill and decode policies."""
