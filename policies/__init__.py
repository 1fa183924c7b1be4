"""Who serves it? Pure routing decisions over what a real router could see.

A router is a small object with a ``name`` and one ``select`` method: it gets the request and the
workers as a real router knows them (:class:`~eldr_sim.policies.base.RequestInfo`,
:class:`~eldr_sim.policies.base.Workers`), and returns the index of the worker that serves, or None
to hold the request. No policy knows of the simulator, so each can stand in front of a real engine
as it is.

==================  =========  ====================================================================
name                decision   rule
==================  =========  ====================================================================
``random``          decode     a worker uniformly at random
``round_robin``     both       the workers in turn
``jsq``             decode     join the shortest queue
``p2c``             decode     power of two choices: the less loaded of two sampled workers
``domain``          decode     oracle domain label: workers split among the domains, JSQ inside
``eldr``            decode     expert signature against one centroid a worker, locality band
``marginal_cost``   decode     the least growth of cost, by predicted expert unions and step times
``oracle``          decode     no router: ``marginal_cost`` that is told the future experts
``least_loaded``    prefill    join the shortest queue
``prefix_hash``     prefill    equal prompt prefixes to one worker, unless it is overloaded
``saturation``      prefill    the longest cached prefix among workers short of work, else hold
==================  =========  ====================================================================

- ``base``: the routers' protocols, what they see, and what a policy is built from;
- ``registry``: policies by name, open to other packages through the entry-point group
  ``eldr_sim.policies`` (a worked example stands in ``docs/example_policy``);
- ``routing``: the policies above; ``eldr``: its signatures, the offline fit, the locality band;
- ``placement``: on which GPU of a group an expert lives; ``replicas``: which copy computes;
- ``queue``: which waiting request an engine serves next.

Symbols follow ELDR (Sec. 4): L layers, E experts a layer, K decode workers, N calibration
requests, tau the width of the locality band.
"""
