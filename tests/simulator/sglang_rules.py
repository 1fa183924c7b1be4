"""SGLang 0.5.9's rules where KV is scarce, without a radix cache, to be read: one engine, whose
chunks and decoding take turns, steps that are planned while the one before runs.

A step's output is processed when the next one has been launched, so that a sequence which has ended
rides in the step after (`Scheduler.event_loop_overlap`) and stays in the batch until a step of
decoding is planned later still (`update_running_batch`). Where a request found no room, or no
place, nothing is admitted before a sequence has left the batch (``batch_is_full``).
"""

from types import SimpleNamespace

FIRST_SHARE, LEAST_SHARE, STEPS_TO_LEAST, RETRACT_STEPS = 0.7, 0.14, 600, 20


class Engine:
    """One engine; ``settings``: ``seats``, ``chunk``, ``tokens`` and ``recv_interval``."""

    def __init__(self, requests, settings, costs, conservativeness=1.0):
        for name, value in settings.items():
            setattr(self, name, value)
        self.first_share = FIRST_SHARE * conservativeness
        self.costs, self.free, self.share = costs, settings["tokens"], self.first_share
        fresh = {"got": 0, "computed": 0, "held": 0, "retracted": 0, "ended": False}
        self.coming = [
            SimpleNamespace(**r, **fresh) for r in sorted(requests, key=lambda r: r["at"])
        ]
        self.queue, self.running, self.chunked = [], [], None
        self.full, self.polls, self.now, self.busy = False, 0, 0.0, 0.0

    def run(self):
        """Serve all; return steps: begin, end, prompt tokens, sequences decoded."""
        steps, last = [], None
        while True:
            self.receive(last)
            self.merge(last)
            step = self.plan_prompts() or self.plan_decoding()
            if step:
                start = max(self.busy, self.now)
                self.busy = step.end = start + step.seconds
                steps.append([start, step.end, step.tokens, step.decoded])
            if last:
                self.process(last)
            elif step is None:
                if not self.coming:
                    return steps
                self.share, self.now = self.first_share, max(self.now, self.coming[0].at)
            last = step

    def receive(self, last):
        """Look for requests, after ``recv_interval`` steps of decoding (`SchedulerRecvSkipper`)."""
        self.polls += 1 if last and last.decodes else self.recv_interval
        if self.polls >= self.recv_interval:
            self.polls = 0
            while self.coming and self.coming[0].at <= self.now:
                self.queue.append(self.coming.pop(0))

    def merge(self, last):
        """Let the last step's whole prompts run; a chunk that leaves its batch makes room."""
        if last is None or last.decodes:
            return
        whole = [r for r in last.requests if r is not last.chunked]
        self.full = self.full and last.chunked is None
        whole = [r for r in whole if not r.ended]
        if whole:
            self.full = self.full and bool(self.running)
            self.running += whole

    def plan_prompts(self):
        """Admit requests in the order of arrival (`PrefillAdder`); None: there is no prompt."""
        if (self.full or not self.queue) and self.chunked is None:
            return None
        places, budget, chunks = self.seats - len(self.running), self.chunk, []
        if places <= 0 and self.chunked is not None:
            self.full = True
            return None
        promised = self.share * sum(r.output - r.got for r in self.running)
        if self.chunked is not None:
            request = self.chunked
            n = min(request.target - request.computed, budget)
            chunks, budget = [(request, n)], budget - n
            if request.computed + n == request.target:
                self.chunked, promised = None, promised + request.output
            promised += n
        while self.queue:
            request = self.queue[0]
            context = request.prompt + request.got
            self.full = self.full or len(chunks) >= places
            self.full = self.full or context + request.output - request.got >= self.free - promised
            if self.full or budget == 0:
                break
            request.target, n = context, min(context, budget)
            chunks.append((self.queue.pop(0), n))
            budget, promised = budget - n, promised + n
            if n < context:
                self.chunked = request
            else:
                promised += request.output
            self.full = promised >= self.free
            if budget == 0:
                break
        if not chunks:
            return None
        for request, n in chunks:
            self.free -= n
            request.held += n
            request.computed += n
        whole = [r for r, _ in chunks if r is not self.chunked]
        tokens = sum(n for _, n in chunks)
        before = tokens - len(whole)  # the last one of each is decoded
        seconds = (self.costs["chunk_step"] + self.costs["token"] * before) * (before > 0)
        return SimpleNamespace(
            decodes=False, requests=[r for r, _ in chunks], chunked=self.chunked, tokens=tokens,
            decoded=0, seconds=seconds + self.costs["step"] * bool(whole),
            got=[(r, r.retracted) for r in whole],
        )  # fmt: skip

    def plan_decoding(self):
        """Decode what runs; those that have ended leave (`update_running_batch`)."""
        before = len(self.running)
        self.running = [r for r in self.running if not r.ended]
        if len(self.running) > self.free:
            self.retract()
        else:
            least = LEAST_SHARE * self.first_share
            slower = (self.first_share - least) / STEPS_TO_LEAST
            self.share = max(least, self.share - slower * bool(self.running))
        self.full = self.full and len(self.running) == before > 0
        if not self.running:
            return None
        for request in self.running:
            self.free -= 1
            request.held += 1
        return SimpleNamespace(
            decodes=True, requests=self.running, chunked=None, tokens=0, decoded=len(self.running),
            seconds=self.costs["step"], got=[(r, r.retracted) for r in self.running],
        )  # fmt: skip

    def retract(self):
        """Take back the sequences with the fewest outputs, one at least, until a token of each of
        the others fits (`retract_decode`); what a step under way computes for them is lost."""
        self.running.sort(key=lambda r: (r.got, -r.prompt), reverse=True)
        first = True
        while len(self.running) > 1 and (first or len(self.running) > self.free):
            first, request = False, self.running.pop()
            self.free += request.held
            request.held = request.computed = 0
            request.retracted += 1
            self.queue.append(request)
        got = sum(r.got + RETRACT_STEPS for r in self.running)
        self.share = min(1.0, got / (1 + sum(r.output for r in self.running)))

    def process(self, step):
        """Let a step's tokens be known, and free the KV of the sequences that it ended."""
        self.now = max(self.now, step.end)
        for request, retracted in step.got:
            if request.ended or request.retracted != retracted:
                continue
            request.got += 1
            if request.got == request.output:
                request.ended, self.free, request.held = True, self.free + request.held, 0
