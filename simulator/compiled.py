"""The decorator of functions that only compiled code calls.

Compiling takes time on a new machine, and much of it goes into what such functions do not need: a
wrapper that Python could call, and counting references to arrays that their caller holds.
"""

from __future__ import annotations

from functools import partial

from numba import njit

compiled = partial(njit, cache=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
