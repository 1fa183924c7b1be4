"""The arrays of a run: one record a request, worker, running sequence, event and step: all that the
compiled engine reads or changes, and columns when a run has ended. Numbers that compiled functions
pass on are int64: every other type would compile each function anew."""

import numpy as np

# --- who goes on when a prompt is computed: ``POOL.then``, or the number of a router, from 0 ---
#: The worker that has computed it.
HERE = np.int64(-1)
#: No pool: the request ends with its prompt.
NO_POOL = np.int64(-2)
# --- KV blocks that an engine lets who joins count on: ``POOL.reserve`` ---
#: Those of the prompt (vLLM); of the prompt and a share of what is still to come (SGLang); of all
#: tokens to the end (TensorRT-LLM).
OF_PROMPT, OF_SHARE, TO_THE_END = map(np.int64, range(3))
#: Most pools of a cluster: tuples of what each has are so long, whatever their number, that the
#: compiled loop is one.
MAX_POOLS = 8

# --- how a request ended: ``REQUEST.outcome`` is an index into OUTCOMES ---
OPEN, COMPLETED, TOO_LONG, NO_KV_ROOM, AFTER_WINDOW, OVERLOADED = map(np.int64, range(6))
OVER_BUDGET, WORKER_LOST, CANCELLED, NO_WORKER, ABANDONED = map(np.int64, range(6, 11))
OUTCOMES = (
    "",
    #: It generated all its tokens.
    "completed",
    #: Its prompt and output are longer than the model's context.
    "exceeds_max_model_len",
    #: Its whole context would not fit into an otherwise empty KV cache.
    "exceeds_kv_cache",
    #: Not measured: it was still open when the last measured request ended.
    "run_ended_after_window",
    #: The run stopped at its time limit because the cluster could not serve the load.
    "unserved_at_time_limit",
    #: Its prompt is larger than a step may be, where prompts are not computed in chunks.
    "exceeds_token_budget",
    #: Its worker died, and the retry rule gave it up.
    "worker_lost",
    #: Its client gave up.
    "cancelled",
    #: No worker was left to serve it.
    "no_worker_left",
    #: It never came: a turn before it did not complete.
    "session_abandoned",
)

#: Times are seconds of simulated time, negative while still to come.
REQUEST = np.dtype(
    [
        ("arrival_s", np.float64),
        ("sent_s", np.float64),  # left the client; later than arrival under --max-concurrency
        ("tokenized_s", np.float64),  # left the front end, where there is one
        ("prefill_start_s", np.float64),
        ("prefill_end_s", np.float64),
        ("transfer_start_s", np.float64),
        ("transfer_end_s", np.float64),
        ("decode_start_s", np.float64),  # joined the decode batch
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
        ("last_token_s", np.float64),  # of the token before its last preemption
        # The replay window in the bit sets: first row, length, and where the replay begins.
        ("window_row", np.int64),
        ("prompt_len", np.int64),
        ("output_len", np.int64),
        ("window_len", np.int64),
        ("window_offset", np.int64),
        ("window_blocks", np.int64),  # KV blocks that its sliding windows take
        ("trace_request", np.int64),
        ("parent", np.int64),  # that it goes on with; -1: none
        # Where it is, or was last; and whose KV cache it takes over: -1 where it computes its own.
        ("worker", np.int64),
        ("source", np.int64),
        ("reserved", np.int64),  # the worker that has blocks for it before its prompt is computed
        ("preemptions", np.int32),
        # Prompt tokens found in the prefix cache where the prompt is computed, and on the decode
        # worker, which fetches the others; -1 before.
        ("cached_tokens", np.int32),
        ("decode_cached_tokens", np.int32),
        ("queue_key", np.float64),  # what the queue order makes of it: the lowest is served next
        ("ticket", np.int64),  # its place among equals; then in the order of arriving KV caches
        ("queued_s", np.float64),  # came to the engine that it waits at, or waited at last
        ("generated", np.int64),  # output tokens, kept up to date where their KV is lost only
        # Request behind it in a queue of a worker, or its next sibling; before it has come: the
        # one that comes behind it.
        ("next", np.int64),
        # In the heap of those who wait for the first time: its first child, and its elder sibling
        # or, of a first child, the parent; and in their line, who came before it and after it.
        ("child", np.int64),
        ("before", np.int64),
        ("older", np.int64),
        ("newer", np.int64),
        ("domain", np.int16),
        ("outcome", np.int8),
        ("measured", np.bool_),
        ("kv_here", np.bool_),  # the KV cache that it takes over has arrived
        ("watched", np.bool_),  # a process waits for its end
    ],
    align=True,
)

#: What a request has of each try: of a new one when it is sent again.
TRY = (
    "worker", "source", "reserved", "prefill_start_s", "prefill_end_s", "transfer_start_s",
    "transfer_end_s", "decode_start_s", "cached_tokens", "decode_cached_tokens",
)  # fmt: skip

#: The KV blocks of a request on one worker. Two records a request: on a worker that computes its
#: prompt for others, and on the one where it decodes.
BLOCK_TABLE = np.dtype(
    [
        ("found", np.int32),  # blocks that were in the prefix cache when it was admitted
        ("listed", np.int32),  # blocks whose contents other requests may share
        ("private", np.int32),  # all others
        ("full", np.int32),  # full blocks, listed or private, of tokens that are scheduled
    ]
)

#: The blocks of a request on one worker in each group of sliding layers: as many as those of the
#: layers with full attention, but from ``begin`` on alone.
WINDOW = np.dtype(
    [
        ("begin", np.int32),  # the first block that its windows still reach
        ("everywhere", np.bool_),  # any full block can be found, else the last ``reach`` before
        ("reach", np.int32),
        ("last", np.int32),  # where the same prompt goes on,
        ("longer", np.int32),  # or a longer one does,
        ("junction", np.int32),  # or others have parted from it
    ],
    align=True,
)

#: A full KV block that can be found by its hash; or a run of free blocks, full of tokens of one
#: request that no other shares: runs of a request have one hash.
BLOCK = np.dtype(
    [
        ("block_hash", np.int64),
        ("run", np.int32),  # blocks of the run; 0: one block with a hash
        ("start", np.int32),  # number of its first block in the request's context
        ("kept", np.int32),  # blocks before this number were found, and so are the oldest
        ("writer", np.int32),  # request whose tokens were computed into it
        ("n_held", np.int32),  # requests that hold it
        ("before", np.int32),  # neighbours in the list of blocks that nobody holds
        ("behind", np.int32),  # (or the next spare block)
        ("copy", np.int32),  # next block of the same contents, or an older run of the request
        ("loader", np.int32),  # request for which it is on its way from a tier, or -1
        ("first", np.bool_),  # it is found by its hash, the first of those of the same contents
    ],
    align=True,
)

#: What is going on with sessions.
SESSIONS = np.dtype(
    [
        ("next", np.int64),  # request that may come next of those that go on with none, or -1
        ("active", np.int64),  # sessions that have begun and not ended,
        ("most", np.int64),  # at most so many; negative: any number
        ("start", np.float64),  # of the measured window, s; infinite while it is not known
        ("end", np.float64),
        ("n_warming", np.int64),  # requests whose end opens the window (lanes), or 0,
        ("lasts_s", np.float64),  # and how long it is then
        ("busy", np.int64),  # requests that have come and not ended,
        ("idle_s", np.float64),  # or when there were none any more, s
        ("short", np.bool_),  # a lane had no session any more before the window ended
    ]
)

#: Settings of all workers of a pool; `arrays.POOL` has those beside them that are configured.
POOL = np.dtype(
    [
        ("then", np.int64),  # who goes on when a prompt is computed
        ("router", np.int64),  # that chooses among its workers
        ("reports", np.bool_),  # that router hears of computed tokens and blocks
        ("first_worker", np.int64),
        ("n_workers", np.int64),
        # Of a KV cache that its workers fetch, in what one of their GPUs has of it:
        ("kv_bytes_per_token", np.float64),
        ("kv_state_bytes", np.float64),  # of a sequence, of linear attention
        ("n_kv_tensors", np.int64),
        ("descriptor_s", np.float64),
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("n_blocks", np.int64),
        ("window_cap", np.int64),  # most blocks of a request in a group of sliding layers
        ("prefix_caching", np.bool_),
        ("own_experts", np.bool_),  # prompts read the experts of their tokens, else uniform ones
        ("preempt_by_key", np.bool_),  # else the sequence that joined last
        ("aging_s", np.float64),  # who has waited so long comes first, whatever the keys
        ("capture_s", np.float64),  # what recording signatures adds to a step
        ("group_size", np.int64),  # engines that share experts and step together
        ("whole_prompts", np.bool_),  # no chunks: nothing is kept from step to step
        # The engine's rules, see `setup.engines.EngineRules`:
        ("mixed_steps", np.bool_),
        ("poll_steps", np.int64),
        ("wait_steps", np.int64),
        ("wait_tokens", np.int64),
        ("balance_steps", np.int64),
        ("batching_steps", np.int64),
        ("reserve", np.int64),
        ("first_share", np.float64),
        ("least_share", np.float64),
        ("share_step", np.float64),
        ("fewest_first", np.bool_),
        ("fills_up", np.bool_),
        ("token_with_kv", np.bool_),
        ("drops_block", np.bool_),
        ("keeps_ends", np.bool_),
        ("cuts_alone", np.bool_),
        ("rides_from", np.int64),
        ("frees_late", np.bool_),
        ("caches_late", np.bool_),
        ("pads_beside", np.bool_),
        ("allocates_chunks", np.bool_),
        ("streamed_s", np.float64),  # that steps took which streamed weights,
        ("stall_s", np.float64),  # and of which they waited for these
        ("drafts", np.int64),  # most of a sequence and step
        ("lookahead", np.int64),  # KV slots that a sequence holds beyond the tokens of its step
        # Placeholder drafts of a sequence that joins with one token to compute: always, or, as
        # vLLM, only beside others that decode, none of which computes its context.
        ("placeholders", np.int64),
        ("always_pads", np.bool_),
        ("executor", np.int64),  # the address of what its steps do, see `steps.executor`
    ],
    align=True,
)

#: One record a worker. Its running sequences are ``[:batch]``, which decode, and the
#: ``prefilling`` ones behind them, whose context is still being computed.
WORKER = np.dtype(
    [
        ("batch", np.int64),
        ("prefilling", np.int64),
        ("next_start", np.float64),  # when the next step may begin, s
        ("exit_s", np.float64),  # when prompts that end with the last step leave it, s
        # Prompts that the first of several stages has computed and the last one has not: they keep
        # their places in the batch; and the tokens of their contexts.
        ("leaving", np.int64),
        ("leaving_tokens", np.int64),
        ("wake", np.float64),  # time of the boundary that is scheduled, s; negative: none
        ("step_due", np.bool_),  # the start of a step is scheduled
        ("ended", np.bool_),  # the last step completed a sequence
        ("n_group_steps", np.int64),  # steps that the group has made, at its leader
        ("leader", np.int64),  # first engine of its group: holds the start of the group's step
        ("width", np.int64),  # at a group's leader: engines of it that are there, the first ones
        ("slowdown", np.float64),  # its steps take so many times as long: 1 but for stragglers
        ("one_step", np.bool_),  # the next step was scheduled ahead, without who came since
        ("blocked", np.bool_),  # who is next has no KV blocks, and another may soon be next
        ("planned", np.bool_),  # the next step was planned at a boundary: windows have slid for it
        ("stopped", np.int32),  # why the next request was not admitted at the last boundary
        ("tokens", np.int64),  # of the batch, that the next step computes, chunks not among them
        # Sequences that have ended and ride in the next step, and the tokens that it computes.
        ("riding", np.int64),
        ("riding_tokens", np.int64),
        # Sequences that the last step completed and that keep their places and KV blocks until the
        # next step is planned; those with blocks to release are linked by REQUEST.next.
        ("ended_places", np.int64),
        ("ended_head", np.int64),
        # SGLang: completed sequences that keep their places until a step of decoding is planned,
        # and whether nothing is admitted until one has left the batch (`batch_is_full`).
        ("unfiltered", np.int64),
        ("full", np.bool_),
        ("retracts", np.bool_),  # the next step was planned with a retraction
        ("joined", np.int64),  # last sequences of the batch, new since the last step
        ("filled", np.int64),  # prefill workers: sequences whose prompts end in the next step
        ("chunk_tokens", np.int64),  # tokens of contexts that the next step computes
        # Sequences that sit this step of prompts out, their tokens and those of their contexts;
        # and the first of the batch that have sat out since their last token.
        ("resting", np.int64),
        ("resting_tokens", np.int64),
        ("resting_context", np.int64),
        ("rested", np.int64),
        ("polled", np.int64),  # steps since the engine looked for requests,
        ("waited", np.int64),  # and steps that prompts have waited for others
        # At a group's leader: steps that engines with prompts have waited since all have some, the
        # step that was last decided for, and whether prompts wait in it.
        ("batched", np.int64),
        ("balanced_step", np.int64),
        ("balances", np.bool_),
        ("share", np.float64),  # of tokens still to come that are reserved
        ("begun_tokens", np.int64),  # those of all steps so far,
        ("computed_tokens", np.int64),  # and of the steps that had ended at the last boundary
        ("context", np.int64),  # tokens of KV cache of the batch
        ("contexts", np.int64),  # requests that hold KV blocks
        # SGLang's prefill workers: KV caches that have been fetched since the loop looked, linked
        # by REQUEST.newer.
        ("fetched_head", np.int64),
        ("fetched_tail", np.int64),
        ("n_blank", np.int64),  # KV blocks without contents
        ("n_idle", np.int64),  # free KV blocks with contents
        ("n_made", np.int64),  # records of BLOCK in use so far
        ("spare", np.int64),  # first of the records that are free again
        ("idle_head", np.int64),  # least recently freed
        ("idle_tail", np.int64),
        ("n_queued", np.int64),  # requests that have come so far,
        ("n_admitted", np.int64),  # and been admitted, those that come back once more,
        ("last_admitted", np.int64),  # those before the last step began
        # Requests that the engine has and that do not run, and the tokens of their contexts.
        ("n_waiting", np.int64),
        ("waiting_tokens", np.int64),
        # Queues of requests, linked by REQUEST.next; -1 where empty.
        ("new_head", np.int64),  # wait for the first time, see `queues`
        ("oldest", np.int64),  # of them, and the newest
        ("newest", np.int64),
        ("arrived_head", np.int64),  # KV cache is here; wait for a place in the batch
        ("preempted_head", np.int64),  # wait for blocks to recompute their context, in order
        ("loading_head", np.int64),  # have blocks; those they take from KV tiers may be on the way
        ("load_end", np.float64),  # when those have come that the next step's prompts wait for, s
        ("late_head", np.int64),  # came when the next step had been scheduled
        ("late_tail", np.int64),
    ],
    align=True,
)

#: What an engine publishes; see `policies.base.Workers`.
SIGNALS = np.dtype(
    [
        ("waiting", np.int64),
        ("running", np.int64),
        ("waiting_tokens", np.int64),
        ("running_tokens", np.int64),
        ("kv_usage", np.float64),
    ]
)

#: A running sequence.
SEQUENCE = np.dtype(
    [
        ("request", np.int64),
        ("row", np.int64),  # bit-set row of the token that the next step feeds
        ("row_end", np.int64),  # one past the last row of the replay window
        ("row_span", np.int64),  # length of the window: at row_end, go back by it
        ("tokens", np.int64),  # from there on that the next step computes when it decodes: one,
        ("drafts", np.int32),  # and the drafts that it verifies, or placeholders, not counted here
        ("ticket", np.int32),  # its place among those that the engine has admitted
        ("got", np.int64),  # output tokens of its last step,
        ("flying", np.int64),  # and KV that it computed, where the next is planned before its end
        ("rejected", np.int64),  # drafts of it, where the next one is planned before that is known
        ("decodes", np.bool_),  # a step has decoded a token of it
        ("room", np.int64),  # tokens up to the longest context
        ("output_len", np.int64),  # of its request
        ("tokens_left", np.int64),  # output tokens still to generate
        ("free_slots", np.int64),  # tokens that fit into the blocks already held
        ("computed", np.int64),  # tokens of its context that are in the KV cache
        ("todo", np.int64),  # tokens of its context still to compute
        ("chunk", np.int64),  # of which the next step computes so many
        # Output tokens still to generate when its windows slide, or a block of it is full.
        ("slides_at", np.int64),
    ]
)

#: One record a step.
STEP = np.dtype(
    [
        ("start", np.float64),  # s
        ("end", np.float64),  # s
        ("context", np.int64),  # KV tokens that decode attention read, summed over the batch
        ("draft_s", np.float64),  # of the step that went into drafts
        ("plain", np.int32),  # `active` of the sampled tokens alone, where drafts are verified
        ("worker", np.int32),
        ("sequences", np.int32),  # that decoded,
        ("tokens", np.int32),  # tokens that it computed for them,
        ("outputs", np.int32),  # and those that they got
        ("joined", np.int32),  # of which so many for the first time since they joined,
        ("rested", np.int32),  # and so many after steps that they sat out
        ("active", np.int32),  # activated experts, summed over the MoE layers
        ("busiest", np.int32),  # those of the layer's busiest rank, summed over the MoE layers
        ("chunks", np.int32),  # sequences whose context was computed further
        ("chunk_tokens", np.int32),  # by so many tokens
        ("waiting", np.int32),  # requests that the engine had and that did not run
        ("stopped", np.int32),  # why the next of them was not admitted
    ]
)
#: Why an engine did not admit the next request: nothing kept one from it, no place in the batch, no
#: tokens of the step's budget, no KV blocks, a rule that puts prompts off.
ADMITTED, NO_SEAT, NO_TOKENS, NO_BLOCKS, PUT_OFF = map(np.int32, range(5))

#: One record a step of a group of engines; seconds, bytes and pairs are summed over the layers.
GROUP_STEP = np.dtype(
    [
        ("start", np.float64),  # s
        ("end", np.float64),  # s
        ("moe_s", np.float64),  # of the slowest rank of each layer
        ("dispatch_s", np.float64),
        ("combine_s", np.float64),
        ("choice_s", np.float64),  # of the instances of redundant experts
        ("own_s", np.float64),  # of the slowest engine's attention, dense layers and lm_head
        ("wait_s", np.float64),  # for the slowest engine's attention and dense layers, all engines
        ("inside_bytes", np.float64),  # that the busiest GPU sends or receives in its node
        ("between_bytes", np.float64),  # and between nodes
        ("busiest_pairs", np.int64),  # token-expert pairs of the rank that has most
        ("pairs", np.int64),  # of all ranks
        ("leader", np.int32),  # its first engine
        ("n_busy", np.int32),  # engines with anything to compute: so many records of STEP
    ],
    align=True,
)

#: A router: its workers, and the requests that it holds, linked by REQUEST.next.
ROUTER = np.dtype(
    [
        ("first_worker", np.int64),
        ("n_workers", np.int64),
        ("hears_ends", np.bool_),  # its policy wants to know of completions
        ("choose", np.int64),  # where its policy's compiled decisions are, 0: there are none,
        ("forget", np.int64),  # what hears of ends, 0: nothing does,
        ("books", np.int64),  # and what they work on
        ("heard", np.int64),  # completions that they have heard of
        ("head", np.int64),
        ("tail", np.int64),
        ("n", np.int64),
        ("to_ask", np.int64),  # about so many of them, from the head, it is asked again
        ("in_order", np.bool_),  # while one is held, nobody behind it is asked about
        ("longest_first", np.bool_),  # held by length of prompt, not as they came
    ]
)

#: A rule of a router, see `policies.rule`.
RULE = np.dtype(
    [
        ("size", np.int64),  # its workers
        ("in_turn", np.bool_),  # begin behind the one picked last
        ("turn", np.int64),  # where to begin
        ("signals", np.bool_),  # it weighs what engines publish,
        ("seen_s", np.float64),  # then, as it has seen it last
    ]
)

#: The gap between a request's last token before a preemption and the first one after it, s.
GAP = np.dtype([("last_token_s", np.float64), ("resumed_s", np.float64)])

#: A scheduled event; of those at one time, the lowest order is first.
EVENT = np.dtype(
    [("time", np.float64), ("order", np.int64), ("kind", np.int64), ("subject", np.int64)]
)
ARRIVAL, BOUNDARY, STEP_START, DISPATCH, TRANSFER_START, TRANSFER_END, REPORT, PUBLISH = map(
    np.int64, range(8)
)
PROMPT_END = np.int64(8)
#: What an event leaves to be done when it is over, beside the request, see `loop.drain`: its end,
#: or it goes on from where its prompt was computed, a router decides where, it has been read by the
#: front end, it waits for who computes its prompt.
PENDING_END, PENDING_HAND_OVER, PENDING_DISPATCH, PENDING_ROUTE, PENDING_PROMPT = map(
    np.int64, range(5)
)
#: Of the front end, see `front_end`.
READ, COLLECTED, TOKENIZED = map(np.int64, range(9, 12))
LOADED = np.int64(12)  # KV blocks have come from tiers
#: Steps start when all that happens at their instant has happened, by worker.
STEP_ORDER = np.int64(1 << 60)

#: A KV transfer in flight.
FLOW = np.dtype(
    [
        ("egress", np.int64),  # link that it leaves by
        ("ingress", np.int64),  # link that it comes in by
        ("bytes_left", np.float64),
        ("rate", np.float64),
        ("request", np.int64),
        ("open", np.int64),  # has no rate yet
    ]
)

#: The one record of what is going on.
CLOCK = np.dtype(
    [
        ("now", np.float64),  # s
        ("updated", np.float64),  # when the bytes in flight were brought up to date, s
        ("order", np.int64),  # events scheduled so far
        ("n_events", np.int64),  # events waiting
        ("n_steps", np.int64),  # records of STEP filled,
        ("n_group_steps", np.int64),  # and of GROUP_STEP
        ("n_flows", np.int64),
        ("timer", np.int64),  # only the end of a transfer that carries this number counts
        ("n_gaps", np.int64),
        ("arrived", np.int64),  # requests that have arrived,
        ("sent", np.int64),  # and left the client
        ("in_flight", np.int64),
        ("open_measured", np.int64),  # measured requests that have not ended
        ("pending_head", np.int64),  # what the last event asks for, not yet done
        ("pending_tail", np.int64),
        ("n_reported", np.int64),  # completions that routers have heard of
        ("signals_s", np.float64),  # when the engines published their signals, s
        ("publish_due", np.bool_),  # the next time is scheduled
        ("guest_s", np.float64),  # when the control plane's next event is, s; inf: it has none
    ],
    align=True,
)

#: Constants of a run that the loop reads.
SETTINGS = np.dtype(
    [
        ("block_size", np.int64),
        ("max_model_len", np.int64),
        ("max_concurrency", np.int64),  # negative: no limit
        ("load_report_delay_s", np.float64),
        ("signal_interval_s", np.float64),  # 0: at each decision; negative: nobody reads them
        ("routing_s", np.float64),
        ("routing_token_s", np.float64),
        ("setup_s", np.float64),
        ("prefix_block_tokens", np.int64),
        ("n_routers", np.int64),
        # The address of a function of a router and a request, which returns the worker that it
        # chooses, or LOOK, RETURN or FAIL of `choose`; or of a question of `expert_loads` and a
        # group's first engine, or of WAKE or TELL and a request: 0, RETURN or FAIL.
        ("decide", np.int64),
        # Conditional disaggregation: the rule, and its values, see `entry`.
        ("entry", np.int64),
        ("entry_tokens", np.float64),
        ("entry_share", np.float64),
        ("entry_load", np.float64),
        ("reserves_early", np.bool_),  # who decodes a request is chosen, and has blocks, first
        ("front_end", np.bool_),  # requests reach a router through API servers
        ("period", np.int64),  # the tokens of a step take the first so many rows in turn; 0: own
    ],
    align=True,
)
