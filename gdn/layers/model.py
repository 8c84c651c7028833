"""A hybrid model: embedding, decoder layers, norm and head."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from gdn.layers.config import HybridConfig
from gdn.layers.decoder_layer import DecoderLayer, Reduce
from gdn.layers.hyper import HyperConnection
from gdn.layers.norm import RMSNorm
from gdn.layers.rotary import RotaryEmbedding


class HybridModel(nn.Module):
    """Language model of Gated DeltaNet and full attention layers, for inference on packed tokens and paged caches.

    Parameters are not initialised: `gdn.layers.loading` fills them from Transformers' tensors.

    Parameters
    ----------
    config : HybridConfig
        Sizes of this rank (`HybridConfig.per_rank`).
    null_slot : int
        Largest index of a state slot that means padding (vLLM's convention is 0).
    reduce : callable, optional
        Sums a tensor over the tensor-parallel ranks and returns the sum; None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters. The decay parameters of Gated DeltaNet and the rotary table stay float32.

    Attributes
    ----------
    embed_tokens, lm_head : Parameter [vocab, hidden]
        Embedding and head, whole on every rank; with `tie_word_embeddings` the embedding is the head, and there is no `lm_head`.
    layers : ModuleList of DecoderLayer
    norm or hyper_connection_mixer : RMSNorm or HyperConnection
        What is before the head, with residual "plain" or "hyper".
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        null_slot: int = -1,
        reduce: Reduce | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        placed: dict[str, Any] = {"device": device, "dtype": dtype}

        def table() -> nn.Parameter:
            return nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **placed), requires_grad=False)

        self.rotary = RotaryEmbedding(config, device=device)
        self.embed_tokens = table()
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, self.rotary, null_slot=null_slot, reduce=reduce, **placed)
            for layer in range(config.num_hidden_layers)
        )
        if config.residual == "hyper":
            self.hyper_connection_mixer = HyperConnection(config, injects=False, **placed)
        else:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placed)
        if not config.tie_word_embeddings:
            self.lm_head = table()

    def forward(self, input_ids: Tensor, positions: Tensor, step: Any, caches: Any) -> Tensor:
        """Runs one step.

        Parameters
        ----------
        input_ids, positions : Tensor [tokens], Tensor [tokens] of int64
            Tokens of all sequences, packed, and their positions. Rows of padding hold any valid token and position.
        step, caches : StepMetadata, HybridCaches
            Sequences of the step, and the caches of all layers, updated in place.

        Returns
        -------
        Tensor [tokens, hidden]
            Input of the head.

        Raises
        ------
        TypeError, ValueError
            Named after the argument: input_ids that are not packed, positions that are not one per token. The three rows of
            mrope that images need are not served. (For text, mrope is the plain rotary embedding, since its three positions are
            equal.)
        """
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"input_ids: expected dtype int32 or int64, got {input_ids.dtype}")
        if input_ids.dim() != 1:
            raise ValueError(f"input_ids: expected shape [tokens], packed, got shape {list(input_ids.shape)}")
        if positions.shape != input_ids.shape:
            expected = f"shape {list(input_ids.shape)}, one position per token (image positions are not served)"
            raise ValueError(f"positions: expected {expected}, got shape {list(positions.shape)}")
        hidden_states = embedding(input_ids, self.embed_tokens)
        residual: Tensor | None = None
        is_hyper = self.config.residual == "hyper"
        if is_hyper:
            hidden_states = self.hyper_connection_mixer.split(hidden_states)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, positions, step, caches)
        if is_hyper:
            mixed: Tensor = self.hyper_connection_mixer(hidden_states)[0]
            return mixed
        return self.norm.add(hidden_states, residual)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows of hidden states [rows, hidden] that the caller selected."""
        return linear(hidden_states, self.embed_tokens if self.config.tie_word_embeddings else self.lm_head)
