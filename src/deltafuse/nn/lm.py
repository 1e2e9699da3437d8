"""A small language model of delta-rule layers: what the demo trains, and an example of how the layers stack."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problem import describe, fail
from .cache import Cache, LayerCache
from .kda import KimiDeltaAttention
from .norm import RMSNorm


class SwiGLU(nn.Module):
    """Gated MLP: `down(silu(gate(x)) * up(x))`, with `inner_size` channels inside."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """A residual block: `x += attention(norm(x))`, then `x += mlp(norm(x))`."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, inner_size: int, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size)
        self.attention = KimiDeltaAttention(hidden_size, head_dim=head_dim, num_heads=num_heads, layer_idx=layer_idx)
        self.mlp_norm = RMSNorm(hidden_size)
        self.mlp = SwiGLU(hidden_size, inner_size)

    def forward(self, x: Tensor, cache: LayerCache | None, use_cache: bool, cu_seqlens: Tensor | None) -> Tensor:
        mixed, _, _ = self.attention(
            self.attention_norm(x), past_key_values=cache, use_cache=use_cache, cu_seqlens=cu_seqlens
        )
        x = x + mixed
        mlp: Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp


class KimiDeltaLM(nn.Module):
    """A causal language model: embeddings, residual blocks of Kimi Delta Attention and SwiGLU, a tied head.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        hidden_size: of the residual stream.
        num_layers: number of blocks.
        num_heads, head_dim: of the attention, K = V = `head_dim`.
        mlp_ratio: inner size of the MLP over `hidden_size`.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        head_dim: int = 64,
        mlp_ratio: float = 2.5,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        inner_size = int(hidden_size * mlp_ratio)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, head_dim, inner_size, i) for i in range(num_layers))
        self.norm = RMSNorm(hidden_size)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        past_key_values: LayerCache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, T, vocab_size]` of the token after each of `tokens` `[B, T]`.

        `past_key_values` holds the states of the tokens before; with `use_cache` they are brought up to date.
        `cu_seqlens` `[N + 1]` bounds packed sequences; then B is 1.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, past_key_values, use_cache, cu_seqlens)
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Iterator[Tensor]:
        """Yield `length` tokens `[B]` after `prompt` `[B, T]`, each from the recurrent state of those before.

        Args:
            prompt: `[B, T]` with `T >= 1`.
            length: how many tokens to yield.
            temperature: divides the logits; 0 takes the most likely token.
            generator: source of the random numbers.

        Raises:
            ValueError: an empty prompt; a negative temperature.
        """
        if prompt.dim() != 2 or prompt.shape[1] == 0:
            fail("prompt", describe(prompt), "shape [B, T] with T >= 1")
        if temperature < 0:
            fail("temperature", temperature, "0 or more")
        cache = Cache()
        logits = self(prompt, cache, use_cache=True)[:, -1]
        for step in range(length):
            if temperature == 0:
                token = logits.argmax(-1)
            else:
                chances = torch.softmax(logits.float() / temperature, -1)
                token = torch.multinomial(chances, 1, generator=generator).squeeze(-1)
            yield token
            if step < length - 1:
                logits = self(token[:, None], cache, use_cache=True)[:, -1]
