"""Who serves it? Pure routing decisions over what a real router could see.

A router is a small object with one ``select`` method: it gets the request and the workers as a real
router knows them (:class:`~eldr_sim.policies.base.RequestInfo`,
:class:`~eldr_sim.policies.base.Workers`), and returns the index of the worker that serves, or None
to hold the request. No policy knows of the simulator, so each can stand in front of a real engine
as it is. What it needs is one declared value (:class:`~eldr_sim.policies.base.Needs`).
``eldr-sim policies`` lists them.

- ``base``: what policies are, what routers see, and what a policy is built from;
- ``choice``: the one list of their names, and how users spell them;
- ``registry``: policies by name, open to other packages through the entry-point group
  ``eldr_sim.policies`` (a worked example stands in ``docs/example_policy``);
- ``routing``: routers; ``eldr``: its signatures, the offline fit, the locality band;
- ``placement``: on which GPU of a group an expert lives; ``replicas``: which copy computes;
- ``queue``: which waiting request an engine serves next.

Symbols follow ELDR (Sec. 4): L layers, E experts a layer, K decode workers, N calibration
requests, tau the width of the locality band.
"""
