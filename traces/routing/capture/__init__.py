"""Capture of routing traces from engines that run a model.

Modules
-------
prompts
    `read_prompts`: prompts and domain labels from JSONL; `tokenize`.
gates
    Which MoE gates of Hugging Face transformers are known, and what their hooks see.
hf
    `capture_transformers`: prefill and generation in transformers, with hooks on every gate.
vllm_engine
    `capture_vllm`: an offline vLLM run, in a process of its own (``vllm_run``).
vllm_plugin
    The vLLM plug-in that logs the experts of every step while ``ELDR_SIM_CAPTURE`` names a folder.
step_log
    The log that the plug-in writes, and reading it back request by request.
collect
    `collect`: such a log joined with the requests that were sent.
captured
    `CapturedRouting`: what each of them yields; `write_captured` makes a routing trace of it.

Importing this package imports neither torch nor vLLM.
"""
