"""Results of NCCL ranks, a GPU each. Every rank computes the whole call alone too, and compares its own part."""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.gpu.context_inputs import O_ERROR, STATE_ERROR, Sequences, cases, state_error, token_error
from tests.gpu.context_layers import ATTENTION_FORMS, attention_step, delta_net_steps, row_errors, step_errors
from tests.gpu.waits import no_waits


def operators(group: Any) -> None:
    """Outputs and states, the same bits again and on every rank, no wait."""
    rank, size = group.rank(), group.size()
    for name, case in cases(size).items():
        every = Sequences(case)
        segments = every.num_segments(rank)
        assert (segments >= case.segments) if case.segments > 1 else segments == 1, f"{name}: {segments} segments"
        rows, (wanted, wanted_pool) = every.rows(rank), every.chunk()
        results = [every.chunk_on(group), every.chunk_on(group)]
        with no_waits():
            results.append(every.chunk_on(group))
        found, pool = results[0]
        for what, error, limit in (
            ("o", token_error(found, wanted[:, rows]), O_ERROR),
            ("states", state_error(pool[1:-1], wanted_pool[1:-1]), STATE_ERROR),
        ):
            assert error < limit, f"{name}: {what} {error:.2g}, limit {limit}"
        assert same_bits(pool[[0, -1]], every.pool[[0, -1]]), f"{name}: slots of no sequence"
        for again in results[1:]:
            assert all(same_bits(one, other) for one, other in zip(again, results[0], strict=True)), f"{name}: the same bits"
        everywhere = [torch.empty_like(pool) for _ in range(size)]
        dist.all_gather(everywhere, pool, group=group)
        assert all(same_bits(one, pool) for one in everywhere), f"{name}: every rank has the same states"
        y, windows = every.conv()
        with no_waits():
            own_y, own_windows = every.conv_on(group)
        assert same_bits(own_y, y[rows]) and same_bits(own_windows, windows), f"{name}: the convolution"


def refusals(group: Any) -> None:
    """A wrong call of all ranks raises on each of them, with GDN_VALIDATE=1 that of one too; the next call is right."""
    every, is_wrong = Sequences(cases(group.size())["one sequence, weak decay"]), group.rank() == 1
    wanted = every.chunk_on(group)
    for name, wrong in (("backend", "x"), ("use_gate_in_kernel", 1), ("scale", "x")):
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
            every.chunk_on(group, **{name: wrong})
    assert all(same_bits(one, other) for one, other in zip(every.chunk_on(group), wanted, strict=True))
    os.environ["GDN_VALIDATE"] = "1"
    env.reload()
    try:
        with pytest.raises((TypeError, ValueError), match="scale: expected" if is_wrong else "got an error on rank 1"):
            every.chunk_on(group, **({"scale": "x"} if is_wrong else {}))
        assert all(same_bits(one, other) for one, other in zip(every.chunk_on(group), wanted, strict=True))
    finally:
        del os.environ["GDN_VALIDATE"]
        env.reload()


def delta_net(group: Any) -> None:
    """Steps of a layer; the states of a decode row may differ between ranks in their last bits, and how they do is printed."""
    for is_weak in (False, True):
        wanted, found = delta_net_steps(None, is_weak), delta_net_steps(group, is_weak, no_waits)
        for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
            errors = step_errors(one, other)
            assert errors[0] < 2 * O_ERROR and errors[1] < 2 * STATE_ERROR, f"step {step}, weak decay {is_weak}: {errors}"
            everywhere = [torch.empty_like(one.states) for _ in range(group.size())]
            dist.all_gather(everywhere, one.states, group=group)
            if group.rank() == 0:
                same = [all(same_bits(states[slot], one.states[slot]) for states in everywhere) for slot in (1, 2)]
                print(
                    f"Gated DeltaNet, step {step}: states of the ranks have the same bits, slots 1 and 2: {same}", file=sys.stderr
                )


def attention(group: Any) -> None:
    """Rows that are dealt, with an indexer of tokens and one of compressed keys."""
    for fields in ATTENTION_FORMS:
        found, again = attention_step(group, fields), attention_step(group, fields)
        assert same_bits(found, again)
        median, most = row_errors(found, attention_step(None, fields))
        assert median < O_ERROR and most < 0.1, (median, most)


CASES: dict[str, Callable[[Any], None]] = {
    "operators": operators,
    "refusals": refusals,
    "Gated DeltaNet": delta_net,
    "attention": attention,
}


def run(size: int, folder: Path) -> dict[str, list[str]]:
    """Runs the cases on this number of GPUs; returns the errors of each."""
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
