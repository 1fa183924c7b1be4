"""Capture of routing traces from engines that run a model: transformers (``hf``, ``gates``), an
offline vLLM (``vllm_engine``, ``vllm_run``), and a served one, where ``vllm_plugin`` logs steps
(``step_log``) while ``ELDR_SIM_CAPTURE`` names a folder, for ``collect`` to join with what was
sent. ``prompts`` reads, ``captured`` writes. Importing this package imports neither torch nor vLLM.
"""
