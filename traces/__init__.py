"""Request and routing traces: what requests ask for, and which experts a model chose for them.

- ``requests``: arrivals, lengths, domains, logs of requests;
- ``routing``: the format of a routing trace, bit sets, statistics; in it ``capture`` from a running
  model, ``synthetic`` from a generative one, ``imports`` from other tools' recordings;
- ``workload``, ``prompts``: requests joined with a routing trace;
- ``streams``: random streams split by purpose, so policies under one seed see the same requests.
"""
