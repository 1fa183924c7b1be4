"""Which worker serves a request? Pure decisions over what a real router sees.

``base`` says what policies are, what they see and what they need; ``choice`` has the one list of
their names, ``registry`` finds them, those of other packages too (``docs/example_policy``). Symbols
follow ELDR (Sec. 4): L layers, E experts a layer, K decode workers, N calibration requests, tau."""
