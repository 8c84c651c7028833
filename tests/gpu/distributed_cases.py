"""Results of NCCL ranks, a GPU each. Every rank computes the whole call alone too, and compares its own part."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

import gdn
import gdn.distributed
from gdn.layers import AttentionMetadataBuilder, GatedDeltaNet, GDNMetadataBuilder, HybridConfig, SparseAttention
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly
from gdn.runtime import env
from gdn.testing.compare import same_bits

H, HV, D = 16, 32, 128
# Two outputs of kernels with 16-bit operands: each is within about 4e-3 of exact.
O_ERROR, STATE_ERROR = 1e-2, 8e-3
CONFIG = NAMED["qwen3-next-80b"]


@contextmanager
def no_waits() -> Iterator[None]:
    """A call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative error of a head."""
    found, wanted = (x.double().flatten(0, -3).transpose(0, 1).flatten(1) for x in (found, wanted))
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-9)).max())


def inputs(total: int) -> dict[str, Any]:
    """The same tokens on every rank."""
    generator = torch.Generator("cuda").manual_seed(total)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, total, *shape, device="cuda", generator=generator).bfloat16()

    return {"q": random(H, D), "k": random(H, D), "v": random(HV, D), "g": random(HV) - 2, "beta": random(HV)}


def options() -> dict[str, Any]:
    gates = {"A_log": torch.linspace(-2, 1, HV, device="cuda"), "dt_bias": torch.zeros(HV, device="cuda")}
    flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "state_v_first")
    return gates | dict.fromkeys(flags, True)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def parted(lengths: list[list[int]], rank: int) -> tuple[list[int], list[int], Tensor]:
    """Lengths of the sequences, this rank's, and the places of its tokens."""
    rows, start = [], 0
    for parts in lengths:
        first = start + sum(parts[:rank])
        rows += range(first, first + parts[rank])
        start += sum(parts)
    return [sum(parts) for parts in lengths], [parts[rank] for parts in lengths], torch.tensor(rows, device="cuda")


def operators(group: Any) -> None:
    """One sequence in unequal parts, and several with empty ones: outputs, states, the same bits again, no wait."""
    rank, size = group.rank(), group.size()
    even = gdn.distributed.split_tokens(9000, size)
    for lengths in ([even], [[700] * size, [0] * (size - 1) + [130], [64, 1] + [0] * (size - 2), [0] * size]):
        totals, own, rows = parted(lengths, rank)
        every = inputs(sum(totals))
        mine = {name: x[:, rows] for name, x in every.items()}
        count = len(lengths)
        pool = torch.randn(count + 2, HV, D, D, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 0.1
        slots = torch.arange(1, count + 1, device="cuda", dtype=torch.int32)
        given: dict[str, Any] = {**options(), "state_indices": slots, "output_final_state": True}
        wanted_pool = pool.clone()
        wanted, _ = gdn.chunk_gated_delta_rule(**every, **given, initial_state=wanted_pool, cu_seqlens=offsets(totals))
        local, results = offsets(own), []
        for attempt in range(3):
            own_pool = pool.clone()
            if attempt == 2:
                with no_waits():
                    found, _ = call_chunk(mine, given, own_pool, local, group)
            else:
                found, _ = call_chunk(mine, given, own_pool, local, group)
            results.append((found, own_pool))
        found, own_pool = results[0]
        assert error(found, wanted[:, rows]) < O_ERROR, error(found, wanted[:, rows])
        assert error(own_pool[1:-1], wanted_pool[1:-1]) < STATE_ERROR, error(own_pool[1:-1], wanted_pool[1:-1])
        assert same_bits(own_pool[[0, -1]], pool[[0, -1]])
        for again in results[1:]:
            assert all(same_bits(one, other) for one, other in zip(again, results[0], strict=True))
        everywhere = [torch.empty_like(own_pool) for _ in range(size)]
        dist.all_gather(everywhere, own_pool, group=group)
        assert all(same_bits(one, own_pool) for one in everywhere), "every rank has the same states"

        x = every["v"].flatten(2)[0]
        weight = torch.randn(x.shape[1], 4, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
        windows = (
            torch.randn(count + 2, 3, x.shape[1], device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16().mT
        )
        alone, here = windows.clone(), windows.clone()
        wanted = gdn.causal_conv1d_fn(x, weight, conv_states=alone, cache_indices=slots, query_start_loc=offsets(totals))
        with no_waits():
            found = gdn.distributed.causal_conv1d_fn(
                x[rows], weight, conv_states=here, cache_indices=slots, query_start_loc=local, group=group, final_rank=None
            )
        assert same_bits(found, wanted[rows]) and same_bits(here, alone)


def call_chunk(mine: dict[str, Any], given: dict[str, Any], pool: Tensor, local: Tensor, group: Any) -> Any:
    return gdn.distributed.chunk_gated_delta_rule(
        **mine, **given, initial_state=pool, cu_seqlens=local, group=group, final_rank=None
    )


def delta_net(group: Any) -> None:
    """A layer of Qwen3-Next-80B: a prompt and a short one, then the next chunk of both."""
    rank, size = group.rank(), group.size()
    alone, layer = (GatedDeltaNet(CONFIG, cp_group=one, device="cuda", dtype=torch.bfloat16) for one in (None, group))
    for one in (alone, layer):
        fill_randomly(one, 1)
    windows = torch.zeros(4, 3, layer.conv_dim, device="cuda", dtype=torch.bfloat16).mT
    pools = [windows, torch.zeros(4, HV, D, D, device="cuda")]
    own = [pool.clone() for pool in pools]
    for queries, lengths in (([3000, 100], [3000, 100]), ([1, 2000], [3001, 2100])):
        whole, parts = (
            GDNMetadataBuilder("cuda", cp_rank=r, cp_size=s).build(queries, lengths, [2, 1]) for r, s in ((0, 1), (rank, size))
        )
        generator = torch.Generator("cuda").manual_seed(lengths[1])
        hidden = torch.randn(sum(queries), layer.hidden_size, device="cuda", generator=generator).bfloat16()
        wanted = alone(hidden, whole, *pools)
        assert parts.parts is not None
        rows = parts.parts.take(torch.arange(sum(queries), device="cuda"), rank)
        with no_waits():
            found = layer(hidden[rows], parts, *own)
        assert float((found - wanted[rows]).float().norm() / wanted[rows].float().norm().clamp(min=1e-9)) < 2 * O_ERROR
        for pool, other in zip(own, pools, strict=True):
            assert float((pool - other).float().norm() / other.float().norm()) < 2 * STATE_ERROR


def attention(group: Any) -> None:
    """An attention layer of Qwen3-Next-80B, in bf16 and with a compressed indexer: a long prompt, a short one, a decode row."""
    rank, size = group.rank(), group.size()
    for fields in ({}, {"index_n_heads": 4, "index_ratio": 4}):
        config = HybridConfig(**{**vars(CONFIG), **fields})
        alone, layer = (SparseAttention(config, cp_group=one, device="cuda", dtype=torch.bfloat16) for one in (None, group))
        for one in (alone, layer):
            fill_randomly(one, 1)
        queries, lengths, blocks = [5000, 300, 1], [5000, 300, 77], 80
        whole, dealt = (
            AttentionMetadataBuilder(
                "cuda", block_size=64, max_seq_len=64 * blocks, index_ratio=config.index_ratio, cp_rank=r, cp_size=s
            ).build(
                queries, lengths, torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(1)).view(3, -1), [1, 2, 3]
            )
            for r, s in ((0, 1), (rank, size))
        )
        assert whole.dealt is None and dealt.dealt is not None
        generator = torch.Generator("cuda").manual_seed(2)

        def random(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        kv = random(2, 3 * blocks, 64, config.num_key_value_heads, config.head_dim)
        keys = random(3 * blocks, 64 // config.index_ratio, config.index_kv_heads, config.index_head_dim)
        ring = random(4, 4, config.index_kv_heads, config.index_head_dim) if config.index_ratio > 1 else None
        hidden = random(sum(queries), config.hidden_size)
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(queries, lengths, strict=True)]).cuda()
        outputs = []
        for one, metadata in ((alone, whole), (layer, dealt), (layer, dealt)):
            caches = kv.clone(), keys.clone(), None if ring is None else ring.clone()
            outputs.append(one(hidden, positions, metadata, (caches[0][0], caches[0][1]), *caches[1:]))
        wanted, found, again = outputs
        assert same_bits(found, again)
        # Keys of blocks of other sizes may be rounded differently, so a few rows select another position of nearly equal score.
        errors = (found - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
        assert float(errors.median()) < O_ERROR and float(errors.quantile(0.99)) < 0.1, errors.quantile(0.99)


CASES: dict[str, Callable[[Any], None]] = {"operators": operators, "Gated DeltaNet": delta_net, "attention": attention}


def run(size: int, folder: Path) -> dict[str, list[str]]:
    """Runs the cases on so many GPUs; returns the errors of each."""
    processes.start_processes(_rank, (size, str(folder)), nprocs=size, start_method="spawn")
    errors: dict[str, list[str]] = {name: [] for name in CASES}
    for rank in range(size):
        for name, text in torch.load(folder / f"{rank}.pt").items():
            errors[name].append(f"rank {rank}: {text}")
    return errors


def _rank(rank: int, size: int, folder: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which other programs of the host may not survive
    os.environ["VLLM_QSA_PREFILL_USE_CP"], os.environ["VLLM_DSA_USE_CONTEXT_PARALLEL_THRESHOLD"] = "1", "1000"
    env.reload()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store, timeout = f"file://{folder}/store", timedelta(minutes=3)  # kernels are compiled on all ranks at once
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size, device_id=device, timeout=timeout)
    failed = {}
    for name, case in CASES.items():
        try:
            with torch.inference_mode():
                case(dist.group.WORLD)
        except BaseException:
            failed[name] = traceback.format_exc()
            print(f"rank {rank}: {failed[name]}", file=sys.stderr, flush=True)  # should the others never end
            break  # the ranks may be out of step
    torch.save(failed, f"{folder}/{rank}.pt")
    os._exit(0)  # the end of a group waits for ranks that may be gone
