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

Modules:

- ``base``: the routers' protocols, what they see, and what a policy is built from;
- ``registry``: policies by name, open to other packages through the entry-point group
  ``eldr_sim.policies`` (a worked example stands in ``docs/example_policy``);
- ``shortlist``: the rule that most routers end in: of some workers the least loaded or the next;
- ``decode``, ``prefill``, ``eldr``, ``saturation``: the policies above;
- ``signature``: expert signature under six transforms, its quality (Spearman rho), layer masks;
- ``clustering``: K-means on the unit sphere, Hungarian-balanced or vanilla;
- ``placement``: on which GPUs of an expert-parallel worker each expert lives;
- ``eplb``: DeepSeek's load balancer, a placement with copies of loaded experts;
- ``grouping``: groups of experts that tokens choose together;
- ``grace``: GRACE-MoE's placement of such groups with copies of hot experts, and ``affinity``;
- ``time_aware``, ``step_swaps``: experts placed by the time of a layer, through the tables;
- ``home``: experts on the GPUs whose requests use them;
- ``replicas``: which instance of an expert computes a token;
- ``artifact``: the offline fit of ELDR, saved to and loaded from one ``.npz`` file;
- ``signature_quality``: rho by transform and by layers kept, principal components of a fit;
- ``activation``: a request's decode activation predicted from its prefill counts;
- ``unions``: the expert union that each worker's requests are expected to activate;
- ``marginal_cost``: routing by predicted step time, and the oracle of the same rule.

Symbols follow ELDR (Sec. 4): L layers, E experts a layer, K decode workers, N calibration
requests, tau the width of the locality band.
"""
