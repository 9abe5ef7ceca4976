"""vLLM on cached weights: how it is launched, and the plugin that runs inside of it.

:mod:`~wcache.engines.vllm.launch` is read by ``wcache run`` and imports neither torch nor vLLM;
:mod:`~wcache.engines.vllm.plugin` is what vLLM itself finds by its entry point.
"""
