"""The explorer: one page that simulates what its controls say, while they are moved.

Modules
-------
points
    The state of the page as a configuration, its command line, and what is shown of its run.
server
    The page and its stream of points, from processes that are kept warm.
"""
