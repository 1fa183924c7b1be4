"""The front end: API servers that read, wait and tokenise, one prompt or one batch at a time."""


class FrontEnd:
    """The API servers of a twin; each request is of the server that its number says."""

    def __init__(self, twin, spec, prompts):
        self.servers = [ApiServer(twin, spec) for _ in range(spec.n_servers)]
        self.seconds = {
            part: spec.latency.time_s(part, prompts).tolist()
            for part in ("event_loop", "http", "tokenize")
        }

    def send(self, request):
        seconds = {part: of[request.number] for part, of in self.seconds.items()}
        self.servers[request.number % len(self.servers)].receive(request, seconds)


class ApiServer:
    """One event loop, and one tokeniser that collects or a pool of threads."""

    def __init__(self, twin, spec):
        self.twin, self.spec = twin, spec
        self.loop_free = 0.0
        self.queue, self.running = [], 0
        self.opened = None  # when the batch that is being collected got its first prompt

    def receive(self, request, seconds):
        """The loop reads one request after the other; then HTTP takes its time."""
        self.loop_free = max(self.twin.now, self.loop_free) + seconds["event_loop"]
        job = request, seconds["tokenize"]
        self.twin.schedule(self.loop_free + seconds["http"], lambda: self.enqueue(job))

    def enqueue(self, job):
        self.queue.append(job)
        self.look()

    def look(self):
        """Begin what can begin now."""
        if self.spec.mode == "thread_pool":
            while self.queue and self.running < self.spec.threads:
                self.work([self.queue.pop(0)])
        elif self.queue and not self.running:
            if len(self.queue) >= self.spec.most:
                self.begin()
            elif self.opened is None:
                self.opened = mark = object()
                self.twin.schedule(self.twin.now + self.spec.wait_s, lambda: self.time_out(mark))

    def time_out(self, mark):
        if self.opened is mark:
            self.begin()

    def begin(self):
        self.opened = None
        batch, self.queue = self.queue[: self.spec.most], self.queue[self.spec.most :]
        self.work(batch)

    def work(self, jobs):
        times = [seconds for _, seconds in jobs]
        took = 0.0
        for seconds in times:
            took += seconds
        if self.spec.mode == "microbatch_parallel":
            took = max(max(times), took / self.spec.threads)
        self.running += 1
        self.twin.schedule(self.twin.now + took, lambda: self.done(jobs))

    def done(self, jobs):
        self.running -= 1
        for request, _ in jobs:
            request.tokenized_s = self.twin.now
            self.twin.todo.append((self.twin.route, request))
        self.look()
