"""Which requests arrive: arrivals, lengths, domains, and logs of requests."""
