"""Request and routing traces: what requests ask for, and which experts a model chose for them.

Modules
-------
format
    Routing trace format v2: `RoutingTrace`, `open_trace`, `builtin_traces`.
manifest
    `Manifest`: what a trace is, how it is stored and where it came from.
encoding
    The file of expert ids, plain or compressed, and how much of the gate's order it keeps.
writer
    `write_trace`: a whole and valid trace folder, or nothing.
gate_scores
    `GateScores`: an optional part of a trace, the gate's scores summed over prompts.
bitsets
    Expert ids as bit sets for the hot loop, built once and kept in the user's cache folder.
domains
    Domain mixes of the named workloads ``task`` and ``language``, with their sources.
workload
    `make_workload`: arrivals, lengths and prefix blocks joined with a routing trace.
request_logs
    `read_request_log`: Azure CSV, Mooncake JSONL, BurstGPT CSV.
calibration
    `calibration_set`: the requests on which a routing policy is fitted.
import_formats
    Files of other tools: NumPy, Parquet, vLLM and SGLang, expert fingerprints.
import_dumps
    Those without names of requests: SGLang's recorder, llama.cpp's moe-trace, moe-beyond.
importers
    `import_trace`: a routing trace from such a file.
request_spectrum
    `request_spectrum`: the variance between requests, and what a label tells of it.
statistics
    `trace_statistics`: load, reuse and overlap of the experts in a trace.
overlap
    How alike the choices of tokens and requests are.
structure
    Structure in the routing: between layers, between domains, between requests.
copies
    How often a decode batch holds two copies of one trace request.
capture
    Capture of a trace from Hugging Face transformers or vLLM while they run a model.
synthetic
    A generative model of routing, fitted to a trace or from presets.
streams
    Random streams split by purpose, so that policies under one seed see the same requests.
"""
