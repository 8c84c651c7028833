"""gdn.attention on a Hopper GPU: both ways against float64, without a sync, decode in graphs.

Per head, the largest error of a row is at most twice torch's on gathered rows of the same dtype.
"""

import pytest
import torch

import gdn
from gdn.runtime import registry
from tests.gpu import graphs
from tests.gpu.attention import Inputs, Variant, exact, head_errors, make_inputs, of_torch
from tests.gpu.waits import no_waits
from tests.references import reference

pytestmark = pytest.mark.gpu

BACKENDS = tuple(registry.operator("sparse_attention_decode").modules)
VARIANTS = {
    "16/2": Variant(16, 2),
    "24/2-fp16": Variant(24, 2, dtype=torch.float16, block_size=272, layout="packed"),
    "8/1-d128": Variant(8, 1, dim=128, layout="pair"),
    "16/2-gate": Variant(16, 2, has_gate=True),
}
STEPS = {
    "mixed": {"lengths": [700, 33, 259, 90, 130], "new": [1, 3, 40, 90, 64]},
    "prefill of equal lengths": {"lengths": [128, 128, 100, 100], "new": [128, 128, 30, 30]},
    "decode": {"lengths": [700, 1, 33], "new": [1, 1, 4]},
}


def dense(inputs: Inputs, with_host: bool) -> dict[str, object]:
    given = inputs.arguments
    arguments = {name: given[name] for name in ("q", "kv_cache", "block_tables", "query_start_loc", "seq_lens", "gate")}
    if with_host:
        arguments["seq_lens_host"] = given["seq_lens"].tolist()
        arguments["query_lens_host"] = given["query_start_loc"].diff().tolist()
    return arguments


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_host", [True, False], ids=["host lengths", "no host lengths"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact(backend: str, variant: str, name: str, with_host: bool) -> None:
    inputs = make_inputs(VARIANTS[variant], **STEPS[name], k=16, dense=True)
    arguments = dense(inputs, with_host)
    gdn.attention(**arguments, return_lse=True, backend=backend)  # compiles
    torch.cuda.synchronize()
    with no_waits():
        o, lse = gdn.attention(**arguments, return_lse=True, backend=backend)
    exact_o, exact_lse = exact(Inputs(inputs.arguments | {"topk_length": None}, inputs.positions))
    allowed = 2 * head_errors(of_torch(inputs), exact_o)
    errors = head_errors(o, exact_o)
    assert bool((errors <= allowed).all()), f"{(errors / allowed * 2).max():.2f} times torch's"
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=2e-3, rtol=1e-4)
    assert torch.equal(gdn.attention(**arguments, backend=backend), o)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_decode_reads_new_lengths(backend: str, device: torch.device) -> None:
    inputs = make_inputs(VARIANTS["16/2"], [300, 260, 33], [1, 1, 1], 16, dense=True)
    arguments = dense(inputs, with_host=False)
    options = {"max_query_len": 1, "max_seq_len": 512, "backend": backend}
    changes = [
        {"seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device)} for lengths in ([300, 260, 33], [120, 1, 17])
    ]
    for change in changes:
        want = reference.attention(**arguments | change | {"q": arguments["q"].double()})
        assert float(head_errors(gdn.attention(**arguments | change, **options), want).max()) < 1e-2
    graphs.check(gdn.attention, arguments, (), changes, device, **options)
