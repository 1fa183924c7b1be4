"""ELDR: requests routed by the experts that they share."""
