"""Mean waits that queueing theory gives in closed form, or by solving a Markov chain.

A worker with simple enough requests *is* one of these queues, so the simulator must reproduce
their mean waits within the noise of its random draws. Arrivals are Poisson and the order is first
come, first served throughout. Sources: Gross, Shortle, Thompson and Harris, *Fundamentals of
Queueing Theory*, 4th edition (GSTH); Kleinrock, *Queueing Systems*, volumes I and II (K1, K2).
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from eldr_sim.errors import InputError


def mm1_wait(rate: float, mean_s: float) -> float:
    """Return the mean wait in queue of M/M/1, s (GSTH section 2.2, K1 section 3.2).

    ``W = rho / (1 - rho) * mean`` with the load ``rho = rate * mean``.

    Parameters
    ----------
    rate
        Arrivals per second.
    mean_s
        Mean service time, s, exponentially distributed.

    Raises
    ------
    InputError
        If an argument is not positive, or the load is 1 or more.
    """
    return mmc_wait(rate, mean_s, 1)


def mg1_wait(rate: float, mean_s: float, second_moment_s2: float) -> float:
    """Return the mean wait in queue of M/G/1, s: Pollaczek and Khinchine (GSTH 5.1, K1 5.6).

    ``W = rate * E[S^2] / (2 (1 - rho))``.

    Parameters
    ----------
    rate
        Arrivals per second.
    mean_s, second_moment_s2
        ``E[S]``, s, and ``E[S^2]``, s squared, of the service time.

    Raises
    ------
    InputError
        If an argument is not positive, or the load is 1 or more.
    """
    load = _load(rate, mean_s, 1)
    if not second_moment_s2 > 0:
        raise InputError("second_moment_s2", f"{second_moment_s2}", "a number > 0")
    return rate * second_moment_s2 / (2.0 * (1.0 - load))


def md1_wait(rate: float, service_s: float) -> float:
    """Return the mean wait in queue of M/D/1, s: :func:`mg1_wait` of a constant service time."""
    return mg1_wait(rate, service_s, service_s * service_s)


def mdc_wait(rate: float, service_s: float, servers: int) -> float:
    """Return the mean wait in queue of M/D/c, s, by Crommelin's chain (GSTH section 6.2.1).

    Who is in service leaves within a service time, and nobody who begins meanwhile does: a service
    time after n were in system there are ``max(n - c, 0)`` and who arrived. The chain's stationary
    distribution is that of any moment, and Little's law gives the wait.

    Raises
    ------
    InputError
        If an argument is not positive, or the load of a server is 1 or more.
    """
    load = _load(rate, service_s, servers)
    size = servers + math.ceil(
        60.0 / (1.0 - load)
    )  # the tail falls off as that of M/D/1, or faster
    come = np.asarray(stats.poisson.pmf(np.arange(size), rate * service_s))
    chain = np.zeros((size, size))
    for n in range(size):
        left = max(n - servers, 0)
        chain[n, left:] = come[: size - left]
    chain[:, -1] += 1.0 - chain.sum(axis=1)
    balance = chain.T - np.eye(size)
    balance[-1] = 1.0
    share = np.linalg.solve(balance, np.eye(size)[-1])
    return float(share @ np.maximum(np.arange(size) - servers, 0)) / rate


def geometric_moments(step_s: float, mean_steps: float) -> tuple[float, float]:
    """Return ``E[S]``, s, and ``E[S^2]``, s squared, of a geometric number of equal steps.

    ``P(N = n) = p (1 - p)^(n - 1)``, ``n >= 1``, ``p = 1 / mean_steps``: the service time of a
    decode request of geometric output length. ``E[N^2] = (2 - p) / p^2``; many short steps are
    exponential.
    """
    return step_s * mean_steps, step_s**2 * (2.0 * mean_steps**2 - mean_steps)


def erlang_c(servers: int, offered_load: float) -> float:
    """Return the probability that an arrival at M/M/c waits (GSTH section 2.3, K1 section 3.5).

    Parameters
    ----------
    servers
        Number of servers c.
    offered_load
        ``rate * mean service time`` in erlangs, below ``servers``.
    """
    blocked = 1.0  # Erlang B by its recursion over the servers, then C from B
    for k in range(1, servers + 1):
        blocked = offered_load * blocked / (k + offered_load * blocked)
    return servers * blocked / (servers - offered_load * (1.0 - blocked))


def mmc_wait(rate: float, mean_s: float, servers: int) -> float:
    """Return the mean wait in queue of M/M/c, s (GSTH section 2.3, K1 section 3.5).

    ``W = C(c, a) / (c / mean - rate)`` with Erlang's C at the offered load ``a = rate * mean``.

    Raises
    ------
    InputError
        If an argument is not positive, or the load of a server is 1 or more.
    """
    _load(rate, mean_s, servers)
    return erlang_c(servers, rate * mean_s) / (servers / mean_s - rate)


def processor_sharing_sojourn(rate: float, mean_s: float) -> float:
    """Return the mean time in system of M/G/1 under processor sharing, s (K2 chapter 4).

    ``T = mean / (1 - rho)``, whatever the distribution of the work: transfers that share a link.

    Raises
    ------
    InputError
        If an argument is not positive, or the load is 1 or more.
    """
    return mean_s / (1.0 - _load(rate, mean_s, 1))


def stepwise_wait(rate: float, step_s: float, mean_steps: float, seats: int) -> float:
    """Return the mean wait for a seat in a batch that changes between equal steps only, s.

    The exact counterpart of M/M/c for a decode worker: each of the ``seats`` requests of a batch
    ends after a step with probability ``p = 1 / mean_steps``, a step lasts ``step_s`` whatever its
    batch, and who arrives during a step joins at its end at the earliest; an idle worker starts at
    once. With many short steps the wait tends to :func:`mmc_wait`.

    The requests in system at the starts of steps are a Markov chain: from n, Poisson(rate * step)
    arrive and Binomial(min(n, seats), p) leave; at zero the worker idles for 1 / rate on average
    and goes on with one. Its stationary distribution gives the mean number in system over time
    (an arrival spends half a step of the step it falls in), and Little's law the mean wait.

    Parameters
    ----------
    rate
        Arrivals per second.
    step_s, mean_steps
        Seconds a step, mean steps a request.
    seats
        Requests that run at the same time.

    Raises
    ------
    InputError
        If an argument is not positive, or the load of a seat is 1 or more.
    """
    load = _load(rate, step_s * mean_steps, seats)
    if not mean_steps >= 1:
        raise InputError("mean_steps", f"{mean_steps}", "1 or more")
    # The tail falls off like load^n or slower by the arrivals of one step; 1e-12 is left out.
    size = seats + math.ceil(28.0 * (1.0 + rate * step_s) / -math.log(load))
    states = np.arange(1, size + 1)
    leave = np.arange(seats + 1)
    running = np.minimum(states, seats)
    left = np.asarray(stats.binom.pmf(leave, running[:, None], 1.0 / mean_steps))
    come = np.asarray(stats.poisson.pmf(np.arange(size + 1), rate * step_s))
    chain = np.zeros((size, size + 1))  # to 0 .. size
    for i in range(size):
        n = i + 1
        for k in range(min(n, seats) + 1):
            chain[i, n - k :] += left[i, k] * come[: size + 1 - (n - k)]
    idle = chain[:, 0].copy()
    chain[:, -1] += 1.0 - chain.sum(axis=1)
    moves = chain[:, 1:]
    moves[:, 0] += idle
    balance = moves.T - np.eye(size)
    balance[-1] = 1.0
    share = np.linalg.solve(balance, np.eye(size)[-1])
    cycle_s = step_s + float(share @ idle) / rate
    in_system = (float(share @ states) * step_s + rate * step_s * step_s / 2.0) / cycle_s
    return in_system / rate - step_s * mean_steps


def _load(rate: float, mean_s: float, servers: int) -> float:
    for name, value in (("rate", rate), ("mean_s", mean_s), ("servers", servers)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(name, f"{value}", "a finite number > 0")
    load = rate * mean_s / servers
    if load >= 1.0:
        raise InputError("rate", f"a load of {load:g} a server has no steady state", "below 1")
    return load


def shortest_job_first_wait(
    rate: float, seconds: NDArray[np.float64], probability: NDArray[np.float64]
) -> float:
    """Return the mean wait in queue of M/G/1 that serves the shortest waiting job next, s.

    ``W(x) = W0 / ((1 - rho(x-)) (1 - rho(x)))`` with ``W0 = rate E[S^2] / 2`` and ``rho(x)`` the
    load of jobs of ``x`` seconds at most (Phipps, Operations Research 4, 1956; K2 section 3.6):
    jobs of one length are a priority class (Cobham), first come, first served.

    Parameters
    ----------
    rate
        Arrivals per second.
    seconds, probability
        Shape [n]: service times in ascending order, and how likely each is.

    Raises
    ------
    InputError
        If the load is not below 1.
    """
    _load(rate, float(seconds @ probability), 1)
    load = rate * np.cumsum(seconds * probability)
    shorter = np.concatenate([[0.0], load[:-1]])
    residual = rate * float(np.square(seconds) @ probability) / 2.0
    return float(probability @ (residual / ((1.0 - shorter) * (1.0 - load))))
