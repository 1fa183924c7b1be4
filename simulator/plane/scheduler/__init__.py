"""What an engine computes next: queues, admission, preemption."""
