"""GRACE-MoE: experts grouped by affinity, replicated, routed by topology."""
