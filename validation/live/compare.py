"""A recorded live run beside its simulation: errors a step, a request, a component.

:func:`compare_runs` takes pairs of a :class:`~.recording.LiveRun` and its
:class:`~.replay.Replayed` and returns a :class:`Comparison`: a ``summary`` ready for JSON, and the
tables under it. Errors are ``100 * (simulated / live - 1)``, in %, unless said otherwise; in every
list of ``summary`` a row has the same keys, and a figure that does not exist is None.

``summary`` = ::

    {"runs": [                    # one a recorded run, in the order given
        {"setup", "policy", "load",                     # names; load is LoadInfo.name
         "repeat": int,
         "request_rate", "burstiness", "lengths", "num_requests",  # of LoadInfo
         "incomplete": int,       # requests that did not get all their tokens: in no figure below
         "duration_s",            # first post to last token, live
         "simulated_duration_s",
         "output_tokens_per_s",   # live
         "steps": int,            # of all engines
         "mean_batch", "max_batch",  # decoding requests of the steps that decode, live
         "simulated_mean_batch",
         "same_engine_percent"}], # requests that live and simulation gave to the same engine
     "steps": [                   # open loop: each live step predicted from its own composition
        {"setup": str | None,     # None: all set-ups
         "role": "prefill" | "decode" | "colocated" | None,   # of the engine; None: all
         "group": "all" | "decode only" | "with prompts" | "batch 1" | "batch 2-3" | "batch 4-7"
                  | "batch 8-15" | ...,                 # batch: of steps that decode only
         "component": "step" | "moe" | "attention" | "rest",
         "steps": int,
         "live_ms", "predicted_ms",                     # means
         "median_percent", "p90_percent",               # of the absolute errors
         "bias_percent",                                # mean of the errors with their sign
         "median_of_step_percent"}],                    # median |predicted - live| / whole step
     "distinct": [                # distinct experts; every "wrong" must be 0
        {"setup", "policy", "load", "repeat",
         "steps", "layers": int,          # compared: steps * MoE layers
         "wrong_steps", "wrong_layers",   # live log against the union of the trace's rows
         "simulated_steps": int,
         "matched_steps": int,            # simulated steps with the {(request, position)} of a
                                          # live one
         "matched_wrong": int}],          # of those, with another sum of distinct experts
     "requests": [
        {"setup", "policy",
         "load": str | None,      # None: mean over the loads of a set-up and policy
         "repeat": int | None,    # None: mean over the repeats of a load
         "metric": "ttft" | "tpot" | "itl" | "e2el",
         "statistic": "mean" | "p50" | "p90" | "p99",
         "live_ms", "simulated_ms",       # None where load is None
         "error_percent",         # of that repeat; else the mean of the errors with their sign
         "abs_error_percent",     # of that repeat; else the mean of the absolute errors
         "noise_percent",         # noise floor of the live repeats: None with fewer than two
         "range_percent"}],       # (largest - smallest) / mean of the live repeats
     "components": [              # means over requests
        {"setup", "policy", "load", "repeat": int | None,
         "of": "e2el" | "ttft",
         "component": "queue" | "prefill" | "transfer" | "decode" | "host" | "sum",
         "live_ms", "simulated_ms",
         "difference_ms",         # simulated - live
         "percent"}],             # difference over the live mean of what it is a component of
     "headline": {                # of all runs
        "decode_step": {"steps", "median_percent", "p90_percent", "bias_percent"},
        "tpot_p50" | "tpot_p99" | "ttft_p50" | "e2el_p50":
            {"abs_error_percent", "noise_percent"},     # means over set-ups, policies and loads
        "distinct": {"layers", "wrong_layers", "matched_steps", "matched_wrong"}}}

Noise floor
    The mean over all pairs of live repeats of ``|a - b|``, relative to the mean of the repeats: how
    far one live run is from another of the same load, statistic by statistic.
Components
    They add up to E2E (TTFT): *host* is what lies outside the engines (client to engine, engine to
    engine through the proxy, engine to client), *queue* waits for the first step of the prompt,
    *prefill* runs to the end of the step that completes it, *transfer* is from the decode engine's
    queue to the first step there (KV reservation, read, step boundaries), *decode* the rest. When a
    request enters an engine's queue nobody sees: live and simulation both take the calibrated
    ingress after the post.

Tables of :class:`Comparison` (all have ``setup, policy, load, repeat``)::

    steps     engine, role, kind ("prefill" | "decode" | "mixed"), start_s, batch, tokens, context,
              live_ms, predicted_ms, live_moe_ms, predicted_moe_ms, live_attention_ms,
              predicted_attention_ms, live_rest_ms, predicted_rest_ms
    requests  request (row of requests.parquet), prompt_len, output_len, live_ttft_ms,
              simulated_ttft_ms, live_tpot_ms, simulated_tpot_ms, live_e2el_ms, simulated_e2el_ms
              (tpot null where a request has one token)
    gaps      live_ms, simulated_ms: pooled gaps between tokens, one row a gap
"""
