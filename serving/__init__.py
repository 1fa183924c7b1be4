"""The product beside real engines."""
