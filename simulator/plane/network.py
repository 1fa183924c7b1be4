"""KV transfers in flight: links shared max-min fairly, compiled.

Bytes flow at a rate that the sender's egress link and the receiver's ingress link share
max-min fairly (progressive filling, Bertsekas and Gallager, Data Networks, section 6.5.2). Of ``n``
workers ``w`` has the links ``w``, for what comes in, and ``n + w``, for what goes out."""

import math
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Ints, Records
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import schedule
from eldr_sim.simulator.plane.state import FLOW, TRANSFER_END


class Network(NamedTuple):
    """The transfers in flight, and scratch by link."""

    flows: Records  #: ``FLOW``
    done: Ints  #: requests whose transfer has just ended
    rate: Floats  #: ``[links]``: bytes/s
    capacity: Floats  #: ``[links]``
    share: Floats  #: ``[links]``: of its bandwidth that a link has, 1 but for faults
    users: Ints  #: ``[links]``
    touched: Bools  #: ``[links]``: rates on them may change
    links: Ints  #: ``[links]``: those touched, ascending


def make_network(n_requests: int, rate: Floats) -> Network:
    """Return a network without transfers, over links of ``rate`` bytes/s."""
    n_links = len(rate)
    return Network(
        np.zeros(n_requests + 1, FLOW),
        np.zeros(n_requests + 1, np.int64),
        rate,
        np.zeros(n_links),
        np.ones(n_links),
        np.zeros(n_links, np.int64),
        np.zeros(n_links, np.bool_),
        np.zeros(n_links, np.int64),
    )


@compiled()
def begin(
    clock: Any, events: Any, net: Any, source: int, target: int, n_bytes: float, request: int
) -> None:
    """Let the bytes of a transfer flow from a worker to another from now on."""
    egress, ingress = net.rate.shape[0] // 2 + source, target
    _progress(clock, net)
    flow = net.flows[clock[0].n_flows]
    clock[0].n_flows += 1
    flow.egress, flow.ingress, flow.bytes_left = egress, ingress, n_bytes
    flow.rate, flow.request = 0.0, request
    net.touched[:] = False
    net.touched[egress] = net.touched[ingress] = True
    _share(clock, events, net)


@compiled()
def end(clock: Any, events: Any, net: Any) -> Any:
    """Take out the transfers with no bytes left, into ``net.done``; returns how many."""
    _progress(clock, net)
    # What flows in a nanosecond, or in the clock's own resolution, is rounding and not data.
    _, exponent = math.frexp(clock[0].now)
    rounding = max(1e-9, math.ldexp(1.0, exponent - 53))
    net.touched[:] = False
    kept, n_done = 0, 0
    for i in range(clock[0].n_flows):
        flow = net.flows[i]
        if flow.bytes_left <= flow.rate * rounding:
            net.touched[flow.egress] = net.touched[flow.ingress] = True
            net.done[n_done] = flow.request
            n_done += 1
            continue
        if kept != i:
            net.flows[kept] = net.flows[i]
        kept += 1
    clock[0].n_flows = kept
    _share(clock, events, net)
    return n_done


@compiled()
def drop(clock: Any, events: Any, net: Any, request: int) -> None:
    """Take out an unfinished transfer, if it is in flight."""
    _progress(clock, net)
    net.touched[:] = False
    kept = 0
    for i in range(clock[0].n_flows):
        if net.flows[i].request == request:
            net.touched[net.flows[i].egress] = net.touched[net.flows[i].ingress] = True
            continue
        if kept != i:
            net.flows[kept] = net.flows[i]
        kept += 1
    if kept < clock[0].n_flows:
        clock[0].n_flows = kept
        _share(clock, events, net)


@compiled()
def scale(clock: Any, events: Any, net: Any, w: int, share: float) -> None:
    """Let the links of a worker have a share of their bandwidth from now on."""
    _progress(clock, net)
    net.touched[:] = False
    for link in (w, net.rate.shape[0] // 2 + w):
        net.share[link] = share
        net.touched[link] = True
    _share(clock, events, net)


@compiled()
def _progress(clock: Any, net: Any) -> None:
    elapsed = clock[0].now - clock[0].updated
    clock[0].updated = clock[0].now
    for i in range(clock[0].n_flows):
        net.flows[i].bytes_left -= net.flows[i].rate * elapsed


@compiled()
def _share(clock: Any, events: Any, net: Any) -> None:
    """Give the transfers their rates anew, and schedule the end of the first one."""
    n = clock[0].n_flows
    clock[0].timer += 1
    if n == 0:
        return
    spread(net, n)
    share_links(net, n)
    soonest = np.inf
    for i in range(n):
        soonest = min(soonest, net.flows[i].bytes_left / net.flows[i].rate)
    schedule(clock, events, clock[0].now + max(0.0, soonest), TRANSFER_END, clock[0].timer)


@compiled()
def spread(net: Any, n: int) -> None:
    """Touch every link that a chain of transfers connects with a touched one."""
    grows = True
    while grows:
        grows = False
        for i in range(n):
            a, b = net.flows[i].egress, net.flows[i].ingress
            if net.touched[a] != net.touched[b]:
                net.touched[a] = net.touched[b] = grows = True


@compiled()
def share_links(net: Any, n: int) -> None:
    """Share the touched links among ``net.flows[:n]`` max-min fairly."""
    flows, capacity, users = net.flows, net.capacity, net.users
    n_links, left = 0, 0
    for link in range(capacity.shape[0]):
        users[link] = 0
        if net.touched[link]:
            net.links[n_links] = link
            n_links += 1
    for i in range(n):
        flow = flows[i]
        flow.open = net.touched[flow.egress]
        if flow.open:
            capacity[flow.egress] = net.rate[flow.egress] * net.share[flow.egress]
            capacity[flow.ingress] = net.rate[flow.ingress] * net.share[flow.ingress]
            users[flow.egress] += 1
            users[flow.ingress] += 1
            left += 1
    while left > 0:
        best, share = -1, np.inf
        for j in range(n_links):
            link = net.links[j]
            if users[link] > 0 and capacity[link] / users[link] < share:
                best, share = link, capacity[link] / users[link]
        share = max(0.0, share)
        for i in range(n):
            flow = flows[i]
            if flow.open and (flow.egress == best or flow.ingress == best):
                flow.rate, flow.open = share, 0
                left -= 1
                other = flow.ingress if flow.egress == best else flow.egress
                capacity[other] -= share
                users[other] -= 1
        users[best] = 0
