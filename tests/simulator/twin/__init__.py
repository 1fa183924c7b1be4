"""A brute-force twin of the whole cluster: slow, plain Python, written to be read.

It takes what `Cluster` takes and shares no compiled code with it. Experts are sets of
``(layer, expert)``, a worker's KV blocks a list of objects, queues lists, events a sorted list. It
knows no macro-steps: before every step an engine looks at its queues and its blocks.

Each rule of the engine stands in one short function: what a step costs
(`step_seconds.step_seconds`), whose experts it reads (`engine.Worker.experts`), who is admitted
(`engine.Worker.admit` and the three functions it names), what happens when a context is computed
(`engine.Worker.end_sequences`), when a step starts (`engine.Worker.start_when_all_have_come`),
which KV blocks can be shared (`engine.Worker.allocate`), and what a transfer moves
(`cluster.Twin.transfer_blocks`).
"""
