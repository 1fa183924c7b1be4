"""The explorer: one page that simulates what its controls say, while they are moved.

- ``points``: the page's state as a configuration, its command line, and what is shown of its run;
- ``server``: the page and its stream of points, from processes that are kept warm."""
