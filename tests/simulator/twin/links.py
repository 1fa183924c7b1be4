"""KV transfers in flight."""

import math
from dataclasses import dataclass

from .requests import Request


def fair_rates(flows, capacity):
    """Max-min fair rates: all rise together, and those on a full link stop.

    ``flows`` are pairs of links, ``capacity`` a link's bytes/s.
    """
    rates, rising = {}, set(range(len(flows)))
    while rising:
        shares = {}
        for link in {link for i in rising for link in flows[i]}:
            on = [i for i in range(len(flows)) if link in flows[i]]
            taken = sum(rates[i] for i in on if i in rates)
            shares[link] = (capacity(link) - taken) / sum(i in rising for i in on)
        level = min(shares.values())
        full = {link for link, share in shares.items() if share == level}
        stopped = {i for i in rising if full & set(flows[i])}
        rates |= dict.fromkeys(stopped, level)
        rising -= stopped
    return [rates[i] for i in range(len(flows))]


@dataclass(eq=False)
class Flow:
    """A KV transfer whose bytes flow."""

    request: Request
    links: tuple
    bytes_left: float
    rate: float = 0.0


class Links:
    """The bytes in flight, and when the first transfer ends."""

    def __init__(self, twin):
        self.twin, self.flows, self.updated, self.timer = twin, [], 0.0, 0
        self.shares = {}  # of its bandwidth that a link has

    def begin(self, request, n_bytes):
        self.progress()
        links = ("out", request.prefill_worker), ("in", request.decode_worker)
        self.flows.append(Flow(request, links, n_bytes))
        self.share()

    def drop(self, request):
        """Take a transfer out whose bytes have not all flowed."""
        self.progress()
        left = [flow for flow in self.flows if flow.request is not request]
        if len(left) < len(self.flows):
            self.flows = left
            self.share()

    def scale(self, link, share):
        self.progress()
        self.shares[link] = share
        self.share()

    def progress(self):
        elapsed, self.updated = self.twin.now - self.updated, self.twin.now
        for flow in self.flows:
            flow.bytes_left -= flow.rate * elapsed

    def share(self):
        self.timer += 1
        if not self.flows:
            return
        transfer = self.twin.spec.transfer
        bandwidth = {"out": transfer.bandwidth, "in": transfer.ingress}
        rates = fair_rates(
            [flow.links for flow in self.flows],
            lambda link: bandwidth[link[0]] * self.shares.get(link, 1.0),
        )
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate
        soonest = min(flow.bytes_left / flow.rate for flow in self.flows)
        timer = self.timer
        self.twin.schedule(self.twin.now + max(0.0, soonest), lambda: self.end(timer))

    def end(self, timer):
        if timer != self.timer:
            return  # the rates have changed since
        self.progress()
        rounding = max(1e-9, math.ulp(self.twin.now))  # s: what flows in it is no data
        done = [flow for flow in self.flows if flow.bytes_left <= flow.rate * rounding]
        self.flows = [flow for flow in self.flows if flow not in done]
        self.share()
        for flow in done:
            self.twin.transferred(flow.request)
