"""Gimbal: engines balanced, queues ordered, experts relocated."""
