"""The model as SimPy processes, to be read and changed; the compiled plane is equal to it.

Read it in this order, which is the life of a request:

===================  ==========================================================================
`clock`              which of the things that happen at one instant happens first
`requests`           a request, and a running sequence of an engine
`cluster`            arrivals, hand-overs, transfers, the end: everything outside an engine
`front_end`          API servers: read and tokenise
`router`             a policy chooses a worker, or holds the request
`worker`             an engine core: `Prefiller`, `Decoder`, `Colocated`; when steps start and end
`scheduler`          vLLM's scheduler: what runs in the next step, with how many tokens
`sglang`             SGLang's scheduler instead
`kv_blocks`          KV blocks and the prefix cache
`experts`            which experts the tokens of a step activate
`speculation`        drafts: how many are accepted, what they cost
`group`              engines that share experts and step together
`links`              KV transfers over links that are shared max-min fairly
`faults`             workers that die, hang, slow down, drain and come back; clients that give up
===================  ==========================================================================

Step times, policies and requests are the objects that the compiled plane uses. Change an engine by
a subclass: `simulate(config, backend="simpy", workers={"decode": MyDecoder})`, see
``docs/engines.md``. Equality is tested in ``tests/simulator/test_engine.py``."""
