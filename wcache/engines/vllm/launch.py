"""How ``wcache run`` starts vLLM, reads its log and knows that it serves; without torch or vLLM."""

import importlib.metadata
import os
import re
from collections.abc import Sequence

from wcache.config import Loader
from wcache.engines.interface import Launch, Mark, Probe, Sign, Wish
from wcache.engines.orders import Orders
from wcache.engines.vllm import versions
from wcache.engines.vllm.arguments import Arguments
from wcache.errors import UsageError, WcacheError

NAME = "vllm"
LOAD_FORMAT = "wcache"
_PLUGINS = "VLLM_PLUGINS"
_DEFAULT_PORT = 8000

_REFUSED = {
    "--enable-eplb": "rebalancing experts writes into their weights",
    "--enable-sleep-mode": "sleeping frees the weights, and they are not this engine's",
    "--weight-transfer-config": "weight updates write into the weights",
    "--cpu-offload-gb": "offloading moves the weights",
}
_BUDGET = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
# Servers that are asked in other ways than over TCP with a completion.
_NO_PROBE = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--config", "--grpc")

_MARKS = tuple(
    Mark(phase, re.compile(pattern))
    for phase, pattern in (
        ("imports", r"Initializing a V1 LLM engine"),
        ("distributed", r"rank \d+ in world size \d+ is assigned"),
        ("weights", r"Model loading took "),
        ("compile", r"torch\.compile took |torch\.compile takes "),
        ("profile", r"KV cache size: [\d,]+ tokens"),
        ("capture", r"Graph capturing finished"),
        ("init", r"init engine \("),
        ("server", r"Application startup complete"),
    )
)


class Vllm:
    """``vllm serve``, and the modules behind it; see :class:`wcache.engines.interface.Engine`."""

    name = NAME
    marks: Sequence[Mark] = _MARKS
    runs_ranks_in_order = True

    def loaders(self, wish: Wish) -> Sequence[Loader]:
        """The first engine fills its ranks, or vLLM's own loader: only they know how it fuses and
        lays out weights."""
        del wish
        return ("publish", "vllm")

    def recognises(self, argv: Sequence[str]) -> bool:
        return Arguments.of(argv) is not None

    def wish(self, argv: Sequence[str]) -> Wish:
        given = _arguments(argv)
        _check_config(given)
        if given.model is None:
            raise UsageError("vllm is given no model", hint="vllm serve MODEL, options behind it")
        dtype = given.value("--dtype")
        return Wish(
            model=given.model,
            revision=given.value("--revision"),
            dtype=None if dtype == "auto" else dtype,
            tp=given.number("--tensor-parallel-size", 1),
            pp=given.number("--pipeline-parallel-size", 1),
            dp=given.number("--data-parallel-size", 1),
            quantization=given.value("--quantization"),
        )

    def launch(self, argv: Sequence[str], orders: Orders) -> Launch:
        given = _arguments(argv)
        _check_config(given)
        _check_plugins(os.environ.get(_PLUGINS))
        for option, reason in _REFUSED.items():
            if given.has(option) and not _is_zero(given.value(option)):
                raise UsageError(
                    f"{option} does not go with cached weights: {reason}",
                    hint=f"leave {option} out, or use wcache run --mode off",
                )
        _check_version(given)
        asked = given.value("--load-format")
        if given.has("--load-format") and asked != LOAD_FORMAT:
            raise UsageError(
                f"--load-format {asked} is given, and cached weights need"
                f" --load-format {LOAD_FORMAT}",
                hint="leave --load-format out, or use wcache run --mode off",
            )
        added = () if asked == LOAD_FORMAT else ("--load-format", LOAD_FORMAT)
        return Launch(argv=(*argv, *added), environment=orders.environment())

    def probe(self, argv: Sequence[str]) -> Probe | Sign:
        given = _arguments(argv)
        if given.has("--headless"):
            return Sign("init")  # an engine alone, which another node's server speaks for
        if any(given.has(option) for option in _NO_PROBE) or given.value("--runner") == "pooling":
            return Sign("server")
        name = given.value("--served-model-name") or given.model
        key = given.value("--api-key") or os.environ.get("VLLM_API_KEY")
        return Probe(
            host=given.value("--host") or "",
            port=given.number("--port", _DEFAULT_PORT),
            path="/v1/completions",
            body={
                **({"model": name} if name else {}), "prompt": "1", "max_tokens": 1,
                "temperature": 0,
            },
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip


def _arguments(argv: Sequence[str]) -> Arguments:
    given = Arguments.of(argv)
    if given is None:
        raise UsageError(f"{argv[0] if argv else 'nothing'} does not start vllm's server")
    return given


def _check_config(given: Arguments) -> None:
    if given.has("--config"):
        raise UsageError(
            "wcache does not read vllm's --config file, which could contradict the cache",
            hint="give its options on the command line",
        )


def _check_plugins(listed: str | None) -> None:
    if listed is None or "wcache" in [name.strip() for name in listed.split(",")]:
        return
    raise UsageError(
        f"{_PLUGINS} is {listed!r}, which keeps vllm from loading wcache's plugin",
        hint=f"{_PLUGINS}={','.join(filter(None, (listed, 'wcache')))}, or unset it",
    )


def _check_version(given: Arguments) -> None:
    """Where vLLM is installed beside wcache; in another environment its plugin looks itself.

    Raises :class:`WcacheError` for a version out of range, and :class:`UsageError` for one that
    would take the cached weights' memory for its own and is given no budget.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return
    if versions.check(version) >= versions.KNOWS_EXTERNAL_WEIGHTS or not _has_gpus():
        return
    if not any(given.has(option) for option in _BUDGET):
        raise UsageError(
            f"vllm {version} does not know of weights that lie on the GPU already, and would plan"
            " with their memory a second time",
            hint=f"give it a budget without them: {_BUDGET[0]}, or {_BUDGET[1]}; vllm 0.32 and"
            " later are told of them",
        )


def _is_zero(value: str | None) -> bool:
    return re.fullmatch(r"0*\.?0*", value or "x") is not None


def _has_gpus() -> bool:
    from wcache.machine.devices import visible_gpus

    try:
        return bool(visible_gpus())
    except WcacheError:
        return False
