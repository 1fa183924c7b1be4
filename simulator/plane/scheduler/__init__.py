"""Who computes next in an engine: queues, admission, preemption."""
