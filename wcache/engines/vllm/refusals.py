"""What of vLLM can not be had over weights that are mapped for reading, and why."""

from typing import Any

from wcache.errors import UsageError

ALTERNATIVE = "or start the engine without wcache (wcache run --mode off)"


def check_features(vllm_config: Any) -> None:
    """Raises :class:`UsageError` for a feature that writes into weights, moves or frees them."""
    for has, option, reason in (
        (
            getattr(vllm_config.parallel_config, "enable_eplb", False),
            "--enable-eplb",
            "rebalancing experts writes into their weights",
        ),
        (
            getattr(vllm_config, "weight_transfer_config", None) is not None,
            "--weight-transfer-config",
            "weight updates write into the weights",
        ),
        (
            getattr(vllm_config.model_config, "enable_sleep_mode", False),
            "--enable-sleep-mode",
            "sleeping frees the weights, and they are not this engine's",
        ),
        (_offloads(vllm_config), "--cpu-offload-gb", "offloading moves the weights"),
    ):
        if has:
            raise UsageError(
                f"{option} does not go with weights that are mapped for reading: {reason}",
                hint=f"leave {option} out, {ALTERNATIVE}",
            )


def check_is_target(vllm_config: Any, model_config: Any) -> None:
    """Raises :class:`UsageError` when a speculative draft is to be loaded by the target's loader.

    A rank holds one model; the draft would be taken for it, and not fit.
    """
    if model_config is vllm_config.model_config:
        return
    raise UsageError(
        "the draft model of a speculative configuration can not come from the target's cache",
        hint='add "draft_load_config": {"load_format": "auto"} to --speculative-config: the draft'
        " is then read from disk, and the target taken from the cache",
    )


def _offloads(vllm_config: Any) -> bool:
    # Where the settings are differs by version: in a section of their own, or with the KV cache's.
    section = getattr(vllm_config, "offload_config", None)
    settings = (
        (getattr(section, "uva", None), "cpu_offload_gb"),
        (getattr(section, "prefetch", None), "offload_group_size"),
        (getattr(vllm_config, "cache_config", None), "cpu_offload_gb"),
    )
    return any((getattr(holder, name, 0) or 0) > 0 for holder, name in settings)
