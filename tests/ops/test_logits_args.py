"""The QSA operators' doors: what is refused, with which words, and that a refused call touches nothing."""

import pytest
import torch

import gdn
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.oracle import exact_mqa_logits, exact_paged_mqa_logits, logits_error
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.described import plain

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = torch.float8_e4m3fn
M, NK, H, D = 6, 40, 4, 64


def ragged(dtype="float8_e4m3fn", kv_heads=1):
    problem = MqaLogitsProblem(H, kv_heads, D, dtype, dtype != "bfloat16", "float32", True, True, "float32", False, M, NK, NK)
    inputs = make_mqa_inputs(problem)
    names = ("q", "k", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "k_scale")
    return {name: getattr(inputs, name) for name in names}, inputs


def paged(dtype="float8_e4m3fn", scaled=True, next_n=2):
    problem = PagedMqaLogitsProblem(H, 1, D, dtype, scaled, "float32", True, True, "float32", 16, next_n, False, 3, 50)
    inputs = make_paged_inputs(problem, lengths=[50, 7, 0], page_pad_bytes=32)
    return inputs.arguments(), inputs


# The wording of relations between arguments; what is refused of every argument is in tests/ops/spoiling.
RAGGED_REFUSALS = [
    # argument, what comes, the error, words of its message
    ("k", lambda a: a["k"].bfloat16(), TypeError, ["float8_e4m3fn", "bfloat16"]),
    ("q", lambda a: {"k": a["k"].expand(NK, 3, D).contiguous()}, ValueError, ["multiple of the 3 key heads", "4 heads"]),
]


@pytest.mark.parametrize(("argument", "come", "error", "words"), RAGGED_REFUSALS)
def test_ragged_refusals(argument, come, error, words):
    refused(gdn.mqa_logits, ragged()[0], argument, come, error, words, out=torch.full((M, NK), 7.0))


def refused(function, arguments, argument, come, error, words, out):
    """Checks that the message begins with the argument and has the words, and that nothing is written."""
    came = come(arguments)
    arguments |= came if isinstance(came, dict) else {argument: came}
    with pytest.raises(error) as caught:
        function(**arguments, out=out)
    message = str(caught.value)
    assert message.startswith(f"{argument}:"), message
    for word in words:
        assert word in message, message
    assert bool((out == 7.0).all())


def test_bfloat16_keys_take_no_scale():
    arguments, _ = ragged("bfloat16")
    with pytest.raises(ValueError, match="^k_scale: expected None"):
        gdn.mqa_logits(**arguments | {"k_scale": torch.ones(NK)})


@pytest.mark.parametrize("backend", ["tilelang", "cute"])
def test_an_ordered_kernel_needs_a_gpu(backend):
    arguments, _ = ragged()
    out = torch.full((M, NK), 7.0)
    with pytest.raises(ValueError, match="SM90"):
        gdn.mqa_logits(**arguments, backend=backend, out=out)
    assert bool((out == 7.0).all())


PAGED_REFUSALS = [
    ("cache", lambda a: a["cache"][..., :-4], ValueError, [f"{D + 4}", f"{D}"]),
    ("cache", lambda a: torch.zeros(3, 16, 1, D, dtype=torch.bfloat16), TypeError, ["uint8 or float8_e4m3fn"]),
    ("cache", lambda a: torch.zeros(3, 1, 16, D + 4, dtype=torch.uint8).transpose(1, 2)[:, ::2], ValueError, ["cache"]),
    ("cache", lambda a: pages_apart(16 * 68 + 8), ValueError, ["multiple of 16 bytes", str(16 * 68 + 8)]),
    ("cache", lambda a: pages_apart(16), ValueError, ["page stride of at least"]),
]


def pages_apart(num_bytes):
    """Three pages whose first bytes are this far apart."""
    return torch.zeros(9999, dtype=torch.uint8).as_strided((3, 16, 1, D + 4), (num_bytes, 68, 68, 1))


@pytest.mark.parametrize(("argument", "come", "error", "words"), PAGED_REFUSALS)
def test_paged_refusals(argument, come, error, words):
    refused(gdn.paged_mqa_logits, paged()[0], argument, come, error, words, out=torch.full((6, 50), 7.0))


def test_values_are_checked_on_the_cpu_and_others_on_request(monkeypatch):
    arguments, _ = paged()
    wrong = arguments | {"block_tables": torch.full_like(arguments["block_tables"], 10**6)}
    gdn.paged_mqa_logits(**arguments)
    out = torch.full((6, 50), 7.0)
    with pytest.raises(ValueError, match=r"^block_tables\[0, 0\]: expected a page in \[0, \d+\), got 1000000"):
        gdn.paged_mqa_logits(**wrong, out=out)
    assert bool((out == 7.0).all())
    with pytest.raises(ValueError, match="^slot_mapping: expected slots below 32"):
        gdn.write_indexer_cache(torch.zeros(1, D), torch.zeros(2, 16, D + 4, dtype=torch.uint8), torch.tensor([32]))
    ragged_arguments, _ = ragged()
    below = ragged_arguments | {"cu_seqlen_ks": torch.full((M,), -1, dtype=torch.int32)}
    assert same_bits(gdn.mqa_logits(**below), gdn.mqa_logits(**below | {"cu_seqlen_ks": torch.zeros(M, dtype=torch.int32)}))
    monkeypatch.setenv("GDN_VALIDATE", "1")
    env.reload()
    gdn.mqa_logits(**ragged_arguments)
    with pytest.raises(ValueError, match="^cu_seqlen_ks: expected starts >= 0, got -1"):
        gdn.mqa_logits(**below)
    with pytest.raises(ValueError, match=f"^max_seqlen_k: expected at least {NK}"):
        gdn.mqa_logits(**ragged_arguments, max_seqlen_k=NK - 1)


@pytest.mark.parametrize("topk", [3, 64])  # in steps; nothing to score
def test_combined_operators_check_device_values_before_they_write(topk, switch):
    switch(GDN_VALIDATE="1")
    arguments, _ = ragged()
    starts = torch.cat([torch.zeros(M - 1, dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)])
    out = torch.full((M, topk), 7, dtype=torch.int32)
    with pytest.raises(ValueError, match="^cu_seqlen_ks: expected starts >= 0, got -1"):
        gdn.indexer_topk(**arguments | {"cu_seqlen_ks": starts}, topk=topk, workspace_bytes=2 * NK * 4, out=out)
    assert bool((out == 7).all())
    gdn.indexer_topk(**arguments, topk=topk, workspace_bytes=2 * NK * 4, out=out)
    assert not bool((out == 7).all())

    arguments, _ = paged()
    del arguments["max_context_len"]
    tables = arguments["block_tables"].clone()
    tables[1, 0] = 10**6  # of the second sequence; a step is one
    out, step = torch.full((6, topk), 7, dtype=torch.int32), 2 * 16 * tables.shape[1] * 4
    with pytest.raises(ValueError, match=r"^block_tables\[1, 0\]: expected a page in"):
        gdn.paged_indexer_topk(**arguments | {"block_tables": tables}, topk=topk, workspace_bytes=step, out=out)
    assert bool((out == 7).all())
    gdn.paged_indexer_topk(**arguments, topk=topk, workspace_bytes=step, out=out)
    assert not bool((out == 7).all())


def test_good_calls_of_every_form():
    for dtype in ("float8_e4m3fn", "bfloat16"):
        arguments, inputs = ragged(dtype)
        exact = exact_mqa_logits(inputs)
        assert logits_error(gdn.mqa_logits(**arguments), exact, fp8=False) is None
        long = {name: arguments[name].long() for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
        assert logits_error(gdn.mqa_logits(**arguments | long, backend="reference"), exact, fp8=False) is None
    arguments, inputs = ragged()
    pair = (inputs.k[:, 0], inputs.k_scale[:, 0])
    ranges = (inputs.cu_seqlen_ks, inputs.cu_seqlen_ke)
    got = gdn.fp8_mqa_logits(inputs.q, pair, inputs.weights, *ranges, clean_logits=True)
    assert logits_error(got, exact_mqa_logits(inputs), fp8=False) is None
    got = gdn.fp8_mqa_logits(inputs.q, pair, inputs.weights, *ranges, False, 12)
    assert logits_error(got, exact_mqa_logits(inputs, max_seqlen_k=12), fp8=False) is None
    with pytest.raises(TypeError, match="^kv: expected a pair"):
        gdn.fp8_mqa_logits(inputs.q, inputs.k, inputs.weights, *ranges)

    for dtype, scaled in (("float8_e4m3fn", True), ("float8_e4m3fn", False), ("bfloat16", False)):
        arguments, inputs = paged(dtype, scaled)
        exact = exact_paged_mqa_logits(inputs)
        assert logits_error(gdn.paged_mqa_logits(**arguments), exact, fp8=False) is None
        flat = arguments["cache"].squeeze(2)
        assert logits_error(gdn.paged_mqa_logits(**arguments | {"cache": flat}), exact, fp8=False) is None
    arguments, inputs = paged()
    plan = gdn.get_paged_mqa_logits_metadata(inputs.context_lens, 16, 132)
    assert plan.shape == (133, 2) and plan.dtype == torch.int32
    tensors = [arguments[name] for name in ("q", "cache", "weights", "context_lens", "block_tables")]
    got = gdn.fp8_paged_mqa_logits(*tensors, plan, 50)
    assert logits_error(got, exact_paged_mqa_logits(inputs), fp8=False) is None
    assert gdn.fp8_paged_mqa_logits(*tensors).shape == (6, inputs.block_tables.shape[1] * 16)
    with pytest.raises(ValueError, match="^indices:"):
        gdn.fp8_paged_mqa_logits(*tensors, plan, 50, False, plan)


def test_indexer_topk_holds_its_workspace(monkeypatch):
    """Every step's scores fit the workspace, one buffer serves all steps, and the result is that of one step."""
    import gdn.ops.indexer.indexer_topk as module

    arguments, _ = ragged()
    whole = gdn.indexer_topk(**arguments, topk=8)
    logits = gdn.mqa_logits(**arguments)
    ranges = (arguments["cu_seqlen_ks"], arguments["cu_seqlen_ke"])
    assert torch.equal(whole, gdn.topk_indices(logits, 8, *ranges))
    sizes, buffers = [], set()
    plain = module.reference.mqa_logits

    def spy(*args, **kwargs):
        result = plain(*args, **kwargs)
        sizes.append(result.numel() * result.element_size())
        buffers.add(result.data_ptr())
        return result

    monkeypatch.setattr(module.reference, "mqa_logits", spy)
    limit = 2 * NK * 4
    assert torch.equal(gdn.indexer_topk(**arguments, topk=8, workspace_bytes=limit), whole)
    assert sizes == [limit] * 3 and len(buffers) == 1
    assert torch.equal(gdn.indexer_topk(**arguments, topk=8, max_seqlen_k=NK), whole)
    with pytest.raises(ValueError, match=f"^workspace_bytes: expected at least {NK * 4}"):
        gdn.indexer_topk(**arguments, topk=8, workspace_bytes=NK * 4 - 1)

    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    env.reload()
    long = make_mqa_inputs(MqaLogitsProblem(1, 1, 64, "bfloat16", False, None, True, True, "float32", False, 9, 60_000, 60_000))
    sizes.clear()
    gdn.indexer_topk(long.q, long.k, None, long.cu_seqlen_ks, long.cu_seqlen_ke, 8)
    assert sizes == [4 * 60_000 * 4] * 2 + [60_000 * 4]

    with pytest.raises(TypeError, match="^out:"):
        gdn.indexer_topk(**arguments, topk=8, out=torch.zeros(M, 8))
    with pytest.raises(TypeError, match="^topk:"):
        gdn.indexer_topk(**arguments, topk=8.0)


@pytest.mark.parametrize("name", ["indexer_topk", "paged_indexer_topk"])
def test_bad_groups(name):
    """Wrong ratios, positions and results are named before anything is written."""
    arguments, _ = ragged() if name == "indexer_topk" else paged()
    rows, good = 6, {"topk": 3, "ratio": 4, "positions": torch.arange(6)}
    out = torch.full((rows, 15), -7, dtype=torch.int32)
    bad = [
        ("ratio", {"ratio": 0}, ValueError), ("ratio", {"ratio": 2.0}, TypeError), ("topk", {"topk": 0}, ValueError),
        ("positions", {"positions": None}, ValueError), ("positions", {"ratio": 1}, ValueError),
        ("positions", {"positions": torch.arange(5)}, ValueError), ("positions", {"positions": torch.zeros(6)}, TypeError),
        ("out", {"out": out[:, :14]}, ValueError), ("out", {"topk": 2}, ValueError),
    ]  # fmt: skip
    for named, change, error in bad:
        with pytest.raises(error, match=f"^{named}:"):
            getattr(gdn, name)(**arguments | good | {"out": out} | change)
    assert bool((out == -7).all())
    assert getattr(gdn, name)(**arguments | good, out=out) is out and not bool((out == -7).any())


def test_paged_indexer_topk_in_steps():
    arguments, inputs = paged()
    del arguments["max_context_len"]
    whole = gdn.paged_indexer_topk(**arguments, topk=5)
    width = inputs.block_tables.shape[1] * 16
    stepped = gdn.paged_indexer_topk(**arguments, topk=5, workspace_bytes=2 * width * 4)
    assert torch.equal(whole, stepped)
    logits = gdn.paged_mqa_logits(**arguments, max_context_len=50)
    assert torch.equal(whole[:4], gdn.topk_indices(logits, 5)[:4])
    with pytest.raises(ValueError, match="^workspace_bytes:"):
        gdn.paged_indexer_topk(**arguments, topk=5, workspace_bytes=2 * width * 4 - 1)


OTHER_REFUSALS = [
    ("topk_indices", {"logits": torch.zeros(3, 4), "k": 2, "backend": "cute"}, ValueError, "backend: expected .*, got 'cute'"),
    ("quantize_fp8", {"x": torch.zeros(2, 192)}, ValueError, "x: expected a last dimension that is a multiple"),
    (
        "write_indexer_cache",
        {"k": torch.zeros(2, 2, 32), "cache": torch.zeros(2, 16, 36).byte(), "slot_mapping": torch.zeros(2).long()},
        ValueError,
        "k: expected 1 key heads",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), OTHER_REFUSALS)
def test_other_refusals(function, arguments, error, message):
    with pytest.raises(error, match="^" + message):
        getattr(gdn, function)(**arguments)


ATTENTION_REFUSALS = [
    ("q", lambda a: a["q"][:, :3], ValueError, "q: expected a number of heads"),
    ("kv_cache", lambda a: (a["kv_cache"][0], a["kv_cache"][1].half()), TypeError, r"kv_cache\[1\]:"),
    ("query_start_loc", lambda a: a["query_start_loc"][:2], ValueError, "query_start_loc:"),
    ("gate", lambda a: a["q"].float(), TypeError, "gate: expected dtype bfloat16"),
]


@pytest.mark.parametrize(("argument", "come", "error", "message"), ATTENTION_REFUSALS)
def test_attention_refusals(argument, come, error, message):
    arguments = plain.call("sparse_attention", 3, torch.bfloat16)
    assert gdn.sparse_attention(**arguments).shape == (3, 4, 16)
    arguments[argument] = come(arguments)
    out = torch.full((3, 4, 16), 7.0).bfloat16()
    with pytest.raises(error, match="^" + message):
        gdn.sparse_attention(**arguments, out=out)
    assert bool((out == 7.0).all())


PREPARE_REFUSALS = [
    ("cos_sin", lambda a: a["cos_sin"][:, :2], ValueError),
    ("cache", lambda a: a["cache"][..., :16], ValueError),
    ("rotary_dim", lambda a: 17, ValueError),
    ("fp8", lambda a: False, ValueError),
]


@pytest.mark.parametrize(("argument", "come", "error"), PREPARE_REFUSALS)
def test_prepare_refusals(argument, come, error):
    arguments = plain.call("prepare_indexer", 2, torch.bfloat16)
    before = arguments["cache"].clone()
    with pytest.raises(error, match=f"^{argument}:"):
        gdn.prepare_indexer(**arguments | {argument: come(arguments)})
    assert torch.equal(arguments["cache"], before)
