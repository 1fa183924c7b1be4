"""Capture of routing traces from engines that run a model.

- ``prompts``: prompts and domain labels from JSONL;
- ``hf``: transformers, with hooks on every gate (``gates``);
- ``vllm_engine``: an offline vLLM, in a process of its own (``vllm_run``);
- ``vllm_plugin``: logs the experts of every step (``step_log``) while ``ELDR_SIM_CAPTURE`` names a
  folder; ``collect``: such a log joined with the requests that were sent;
- ``captured``: what each of them yields, and the routing trace made of it.

Importing this package imports neither torch nor vLLM.
"""
