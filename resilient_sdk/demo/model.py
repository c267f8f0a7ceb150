"""A small GPT over bytes: nothing in it knows that the run may be interrupted."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `width` is a multiple of `heads`; `context` is the most bytes it looks at."""

    layers: int
    heads: int
    width: int
    context: int
    dropout: float = 0.1
    vocabulary: int = 256


PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "tiny": GPTConfig(layers=4, heads=4, width=96, context=64),  # 0.5 M parameters
        "small": GPTConfig(layers=6, heads=6, width=336, context=128),  # 8 M parameters
    }
)


class Attention(nn.Module):
    """Causal self-attention; (B, T, width) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.project_in(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: torch.Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention, then a GELU network, each added to what it reads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        summed: torch.Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return summed


class GPT(nn.Module):
    """Predicts the next byte. The head is a matrix of its own: ZeRO-3 partitions it like any other."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_byte = nn.Embedding(config.vocabulary, config.width)
        self.embed_place = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross entropy in nats, a float32 scalar.

        `batch` is a LongTensor (B, T + 1) with T at most `context`: 0 … T - 1 are read, 1 … T predicted.
        """
        read, predicted = batch[:, :-1], batch[:, 1:]
        places = torch.arange(read.shape[1], device=batch.device)
        x = self.dropout(self.embed_byte(read) + self.embed_place(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), predicted.flatten())


def build_gpt(config: GPTConfig) -> GPT:
    """Returns a new GPT in float32, initialised from torch's global generator: one seed, one model."""
    model = GPT(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # What is added to the residual stream is scaled by its depth, or the sum would grow with it.
            depth = 2 * config.layers if name.endswith(("project_out.weight", "mlp.2.weight")) else 1
            nn.init.normal_(parameter, std=0.02 * depth**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model
