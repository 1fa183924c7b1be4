"""MoE-Prefill: prefill-only serving, weights gathered in the background."""
