"""vLLM engines in this process: their options, what is asked of them, and the counters that tell what happened."""

import gc
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.hosts.requests import NEW, Answers

_SIZES = [1, 8, 32, 64]  # batches of captured graphs: few, since each takes time
_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no compilation; decode is captured whole
SPEC = 3  # drafts
_SPECULATION = {"method": "ngram", "num_speculative_tokens": SPEC, "prompt_lookup_max": 2, "prompt_lookup_min": 1}

# What each variant is about -> options of the engine beyond `common`.
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compilation_config": {"cudagraph_capture_sizes": _SIZES}},  # piecewise and full graphs, the host's default
    "chunked": {"max_num_batched_tokens": 512, "compilation_config": _DECODE_GRAPHS | {"cudagraph_capture_sizes": _SIZES}},
    "prefix": {"enable_prefix_caching": True, "compilation_config": _DECODE_GRAPHS | {"cudagraph_capture_sizes": _SIZES}},
    "spec": {
        "speculative_config": _SPECULATION,
        "compilation_config": _DECODE_GRAPHS | {"cudagraph_capture_sizes": [(1 + SPEC) * size for size in _SIZES]},
    },
    # Run it without FlashInfer on the path: the host's norm takes FlashInfer's reduction, with NVLink multicast, wherever it can.
    "tp": {"tensor_parallel_size": 2, "enforce_eager": True, "disable_custom_all_reduce": True},
}


def common(model: Path, *, state: str, backend: str, max_model_len: int = 4096) -> dict[str, Any]:
    """Options of every engine. A fixed cache, so that processes on one GPU do not measure each other's memory."""
    return {
        "model": str(model), "skip_tokenizer_init": True, "max_model_len": max_model_len, "max_num_seqs": 64,
        "max_num_batched_tokens": 8192, "mamba_ssm_cache_dtype": state, "gdn_prefill_backend": backend,
        "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.08, "enable_prefix_caching": False, "seed": 0,
    }  # fmt: skip


def start(options: dict[str, Any]) -> tuple[Any, float]:
    """An engine, and the seconds that its start took."""
    import torch
    from vllm import LLM

    gc.collect()  # an engine before this one
    torch.cuda.empty_cache()
    began = time.perf_counter()
    return LLM(**options), time.perf_counter() - began


def stop(engine: Any) -> None:
    """Frees what an engine holds, so that another can be started in this process."""
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def ask(engine: Any, prompts: list[list[int]], *, prompt_logprobs: bool = True, new: int = NEW) -> Answers:
    """Greedy answers with log-probabilities. Those of prompt tokens make the host read nothing from its prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=new,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if prompt_logprobs else None,
    )
    began = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = Answers([], [], [], [], facts={"seconds": round(seconds, 2)})
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        found.tokens.append(tokens)
        found.logprobs.append(_of(tokens, answer.logprobs))
        found.prompt_logprobs.append(_of(prompt[1:], output.prompt_logprobs[1:]) if prompt_logprobs else [])
        found.cached.append(output.num_cached_tokens or 0)
    return found


def _of(tokens: Iterable[int], entries: Iterable[Any]) -> list[float]:
    """Log-probabilities of tokens in the host's entries, token -> Logprob, one a place."""
    return [float(entry[token].logprob) for token, entry in zip(tokens, entries, strict=True)]


def count_drafts(scheduler: Any) -> dict[str, int]:
    """Counts proposed and accepted draft tokens from now on."""
    counts, original = {"proposed": 0, "accepted": 0}, scheduler.make_spec_decoding_stats

    def counted(stats: Any, **known: Any) -> Any:
        counts["proposed"] += known["num_draft_tokens"]
        counts["accepted"] += known["num_accepted_tokens"]
        return original(stats, **known)

    scheduler.make_spec_decoding_stats = counted
    return counts


def count_preemptions(scheduler: Any) -> list[int]:
    """A list of one number, the preemptions from now on."""
    counts, original = [0], scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[0] += 1
        return original(*arguments, **options)

    scheduler._preempt_request = counted
    return counts


def memory(engine: Any) -> dict[str, int]:
    """Bytes of a block, blocks of the cache, and how many of them a short sequence takes while it runs."""
    from vllm import SamplingParams

    scheduler, inner = scheduler_of(engine), engine.llm_engine
    config, pool = scheduler.kv_cache_config, scheduler.kv_cache_manager.block_pool
    pages = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    before = least = pool.get_num_free_blocks()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    inner.add_request("memory", {"prompt_token_ids": [1, 2, 3]}, params)
    while inner.has_unfinished_requests():
        inner.step()
        least = min(least, pool.get_num_free_blocks())
    return {"bytes of a block": max(pages), "blocks": config.num_blocks, "blocks of a short sequence": before - least}


class JitMonitor(logging.Handler):
    """Collects what the host's own monitor says of compilations; the host starts it when its warm-up is over."""

    LOGGER = "vllm.utils.jit_monitor"

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger(self.LOGGER).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def plug() -> Any:
    """The handle of the adapter that GDN_VLLM switched on in this process; None where it is off."""
    from gdn.integrations import vllm
    from gdn.runtime import env

    chosen = env.current().vllm
    return None if chosen == "0" else vllm.enable(strict=chosen == "strict")


def kernels() -> dict[str, int]:
    """Kernels of gdn in this process: compiled by it, and in memory, compiled or loaded."""
    from gdn.runtime import compiled

    return {"compiled": compiled.compilations(), "in memory": len(compiled._functions)}


def growth(before: dict[str, int], count: Callable[[], dict[str, int]] = kernels) -> dict[str, int]:
    """What was added to counts since."""
    return {name: number - before[name] for name, number in count().items()}
