"""QSA in decode: cache the indexer's FP8 keys, select positions for each query, and attend to these alone."""

import torch

import gdn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEX_HEADS, HEADS, KEY_HEADS, DIM, TOPK = 8, 8, 1, 128, 32
LENGTHS, PAGE = (200, 77), 64  # tokens of two sequences, the new one included

torch.manual_seed(0)
block_tables = torch.tensor([[6, 0, 3, 5], [1, 4, -1, -1]], dtype=torch.int32, device=DEVICE)  # pages of each sequence
context_lens = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)

# A page holds the e4m3 keys of its tokens, then their float32 scales. A token's row counts the tokens of all pages before it.
index_cache = torch.zeros(8, PAGE, 1, DIM + 4, dtype=torch.uint8, device=DEVICE)
index_keys = torch.randn(sum(LENGTHS), DIM, device=DEVICE, dtype=torch.bfloat16)
positions = [torch.arange(length, device=DEVICE) for length in LENGTHS]
rows = [table[place // PAGE].long() * PAGE + place % PAGE for table, place in zip(block_tables, positions, strict=True)]
gdn.write_indexer_cache(index_keys, index_cache, torch.cat(rows))

# One new query a sequence. `prepare_indexer` would norm, rotate and quantise raw ones; these are quantised as they are.
index_queries = torch.randn(len(LENGTHS), 1, INDEX_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
quantised, scales = gdn.quantize_fp8(index_queries)
weights = torch.rand(len(LENGTHS), INDEX_HEADS, device=DEVICE) * scales.reshape(len(LENGTHS), INDEX_HEADS) * DIM**-0.5
selected = gdn.paged_indexer_topk(quantised, index_cache, weights, context_lens, block_tables, TOPK)

kv_cache = torch.randn(2, 8, PAGE, KEY_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
queries = torch.randn(len(LENGTHS), HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
one_each = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=DEVICE)
out = gdn.sparse_attention(queries, kv_cache, selected, block_tables, one_each, context_lens, max_query_len=1)

for sequence, chosen in enumerate(selected.tolist()):
    print(f"sequence {sequence}: {len(chosen)} of {LENGTHS[sequence]} positions, from {chosen[0]} to {chosen[-1]}")
print(f"output {list(out.shape)}, finite: {bool(out.isfinite().all())}")
