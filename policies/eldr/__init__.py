"""ELDR's router: signatures, the offline fit and the locality band."""
