"""What happens in a serving cluster over time? ``run`` takes a configuration to a result;
``setup``: what is made of models, tables and traces; ``plane``: the compiled event loop;
``control``: a run, and what acts on it (``simulation``: under SimPy); ``outcome``: its figures."""
