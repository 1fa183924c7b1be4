"""Schedulers that users derive from the reference model's."""

from eldr_sim.simulator.reference.scheduler import Scheduler
from eldr_sim.simulator.reference.worker import Colocated
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

CONFIG = make_config({
    "trace": "reference-moe", "topology": "1C", "policy": "jsq", "num_requests": 2, "warmup": 0,
    "request_rate": "inf", "output_len": 60, "enable_prefix_caching": False, "frontend": "none",
})  # fmt: skip
_WAIT_S = 0.1


def ttft_of_a_request_that_waits(sets_blocked):
    """Return the time of the second request's first token, which waits a while by choice, and when
    the first one ends."""

    class Waits(Scheduler):
        def admit_new(self, request):
            if self.running and self.worker.env.now - request.queued_s < _WAIT_S:
                self.blocked = self.blocked or sets_blocked
                return False
            return super().admit_new(request)

    class Waiting(Colocated):
        scheduler_class = Waits

    found = simulate(CONFIG, backend="simpy", workers={"decode": Waiting})
    first, second = found.record.requests
    return second["first_token_s"], first["finish_s"]


def test_a_refusal_that_sets_blocked_is_looked_at_after_the_step():
    token_s, end_s = ttft_of_a_request_that_waits(sets_blocked=True)
    assert _WAIT_S < token_s < end_s  # an earlier end would have let it in, too


def test_a_refusal_that_does_not_waits_until_a_request_ends():
    token_s, end_s = ttft_of_a_request_that_waits(sets_blocked=False)
    assert token_s > end_s > _WAIT_S
