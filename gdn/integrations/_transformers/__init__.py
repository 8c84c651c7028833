"""Parts of `gdn.integrations.transformers`. None imports Transformers before `enable` does.

- `layer`: the forward of a Gated DeltaNet module, by one fused operator on the cache's own tensors
- `steps`: the same by an operator a step, for head dims without a fused kernel
- `cached`: what the layer reads and sets of the host's cache
- `packed`: boundaries of sequences that only `position_ids` tell apart
- `functions`: the functions of the modeling modules
- `qsa`: attention with an indexer, of qwen4_exp
- `replacements`: the functions that take the place of a layer's forward
- `points`: what `enable` replaces, and how
- `warm`: runs of every form of call
"""
