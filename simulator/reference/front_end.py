"""The front end: API servers that read, wait and tokenise, before a router sees a request.

vLLM's ``vllm/utils/async_utils.py`` and ``vllm/renderers``: micro-batches of prompts, one after the
other or spread over cores, or a pool of threads with a prompt each (`plane.front_end`)."""

from typing import TYPE_CHECKING

import simpy

from eldr_sim.arrays import Int32s
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.reference.requests import Request

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster

#: A prompt that is to be tokenised, and how long that takes, s.
Job = tuple[Request, float]


class FrontEnd:
    """The API servers of a cluster, which take requests in turn."""

    def __init__(
        self, cluster: "ReferenceCluster", spec: FrontEndSpec, prompt_len: Int32s
    ) -> None:  # fmt: skip
        self.servers = [ApiServer(cluster, spec) for _ in range(spec.n_servers)]
        parts = ("event_loop", "http", "tokenize")
        times = [spec.latency.time_s(part, prompt_len).tolist() for part in parts]
        self.seconds = list(zip(*times, strict=True))

    def send(self, request: Request) -> None:
        """Let the client send a request to the next server in turn."""
        server = self.servers[request.number % len(self.servers)]
        server.receive(request, *self.seconds[request.number])


class ApiServer:
    """One event loop, and one tokeniser that collects prompts or a pool of threads."""

    def __init__(self, cluster: "ReferenceCluster", spec: FrontEndSpec) -> None:
        self.cluster, self.spec, self.env = cluster, spec, cluster.env
        self.loop_free = 0.0
        self.queue: list[Job] = []
        self.running = 0  # threads, or batches
        self.collecting: simpy.Event | None = None

    def receive(self, request: Request, loop_s: float, http_s: float, tokenize_s: float) -> None:
        """Read one request after the other; then HTTP takes its time."""
        self.loop_free = max(self.env.now, self.loop_free) + loop_s
        self.env.call_at(self.loop_free + http_s, self.enqueue, (request, tokenize_s))

    def enqueue(self, job: Job) -> None:
        """Hand a prompt to the tokeniser."""
        self.queue.append(job)
        self.look()

    def look(self) -> None:
        """Begin what can begin now: a batch that is full, or that has waited long enough."""
        if self.spec.mode == "thread_pool":
            while self.queue and self.running < self.spec.threads:
                self.work([self.queue.pop(0)])
        elif self.queue and not self.running:
            if len(self.queue) >= self.spec.most:
                self.begin_batch()
            elif self.collecting is None:
                self.collecting = self.env.call_at(
                    self.env.now + self.spec.wait_s, self.begin_batch
                )

    def begin_batch(self) -> None:
        """Tokenise the prompts that have been collected."""
        self.env.postpone([self.collecting], float("inf"))
        self.collecting = None
        batch, self.queue = self.queue[: self.spec.most], self.queue[self.spec.most :]
        self.work(batch)

    def work(self, jobs: list[Job]) -> None:
        """Tokenise prompts one after the other, or over the cores, and hand all on together."""
        took = 0.0
        for _, seconds in jobs:
            took += seconds
        if self.spec.mode == "microbatch_parallel":
            took = max(max(seconds for _, seconds in jobs), took / self.spec.threads)
        self.running += 1
        self.env.call_at(self.env.now + took, self.done, jobs)

    def done(self, jobs: list[Job]) -> None:
        """Let a router see the prompts."""
        self.running -= 1
        for request, _ in jobs:
            if not request.outcome:  # else its client has given up while servers had it
                request.tokenized_s = self.env.now
                self.cluster.todo.append((self.cluster.route, request))
        self.look()
