"""Requests recorded elsewhere: logs, benchmark results and recorded sessions."""
