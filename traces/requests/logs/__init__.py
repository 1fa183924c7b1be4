"""What was asked for elsewhere: logs, benchmark results and recorded sessions."""
