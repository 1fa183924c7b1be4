"""What is asked for: arrivals, lengths, domains, and logs of requests."""
