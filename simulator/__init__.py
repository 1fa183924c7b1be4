"""What happens in a serving cluster over time?

``run`` takes a configuration to a result, ``simulation`` puts a cluster under SimPy processes.

- ``setup``: the configuration (`RunConfig`), and what it makes of models, tables and traces;
- ``plane``: the compiled event loop, where the life of a request is told; ``plane/steps`` what its
  steps do;
- ``control``: one run of a cluster, and the SimPy processes that act on it;
- ``outcome``: figures, tables, the summary and the folder of a result.
"""
