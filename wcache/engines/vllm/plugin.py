"""What vLLM calls in each of its processes: makes ``--load-format wcache`` known."""

LOAD_FORMAT = "wcache"

_registered = False


def register() -> None:
    """Registers the load format; safe to call again, as vLLM does, and quick when it is not used.

    Raises :class:`wcache.errors.WcacheError` for a vLLM that is too old.
    """
    global _registered
    if _registered:
        return
    import vllm

    from wcache.engines.vllm import versions

    versions.check(str(vllm.__version__))
    from vllm.model_executor.model_loader import register_model_loader

    from wcache.engines.vllm.loader import WcacheModelLoader

    register_model_loader(LOAD_FORMAT)(WcacheModelLoader)
    _registered = True
