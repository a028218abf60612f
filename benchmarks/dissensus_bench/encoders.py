"""Transformer encoders in plain torch: one of tokens (ids and mask in, a dictionary out), one of images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus_bench.problems import Problem


@dataclass(frozen=True)
class Size:
    """How large an encoder and its inputs are.

    Attributes:
        width: Numbers a token.
        depth: Blocks.
        heads: Heads of attention a block.
        length: Tokens of a text, or pixels along an image's side.
        vocabulary: Words, or pixels along a patch's side.
    """

    width: int
    depth: int
    heads: int
    length: int
    vocabulary: int


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a norm and around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.together, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return tokens of the same shape; `mask` says which may be looked at."""
        parts = self.together(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class TextEncoder(nn.Module):
    """A BERT-shaped classifier: ids and a mask of those that are words, a dictionary with logits."""

    def __init__(self, size: Size, classes: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Parameter(0.02 * torch.randn(size.length, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return logits by the first token, and the tokens' states."""
        x = self.words(input_ids) + self.places
        mask = attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        states = self.norm(x)
        return {"logits": self.out(states[:, 0]), "last_hidden_state": states}


class ImageEncoder(nn.Module):
    """A vision transformer: patches as tokens, and one more token that is read at the end."""

    def __init__(self, size: Size, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, size.vocabulary, stride=size.vocabulary)
        tokens = (size.length // size.vocabulary) ** 2 + 1
        self.reader = nn.Parameter(0.02 * torch.randn(1, 1, size.width))
        self.places = nn.Parameter(0.02 * torch.randn(tokens, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.reader.expand(len(patches), -1, -1), patches], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)[:, 0])


def encoder_problems(device: str, quick: bool) -> dict[str, Problem]:
    """Return both jobs by their names: of real sizes on a GPU, smaller ones on a CPU."""
    cuda = device.startswith("cuda")
    members, batches, steps, turn = (5, (32, 64), 100, 10) if cuda else (5, (16, 16), 8, 4)
    if cuda:
        text, image = Size(128, 2, 2, 64, 30_522), Size(192, 12, 3, 64, 16)
    elif quick:
        members, steps, turn = 3, 4, 2
        text, image = Size(32, 1, 2, 8, 200), Size(32, 1, 2, 16, 8)
    else:
        text, image = Size(64, 2, 2, 32, 2000), Size(64, 3, 2, 32, 8)
    vit, name = _vision_transformer(image, cuda)
    generator = torch.Generator().manual_seed(0)

    def problem(batch: int, classes: int, make: Callable[[], nn.Module], x: Any, **more: Any) -> Problem:
        y = torch.randint(0, classes, (batch * steps,), generator=generator).to(device)
        return Problem(members, make, x, y, batch, turn, "cross_entropy", "adamw", bf16=cuda, **more)

    rows = batches[0] * steps
    ids = torch.randint(0, text.vocabulary, (rows, text.length), generator=generator)
    # Texts of differing length: at least a quarter of the places are words.
    ends = torch.randint(text.length // 4, text.length + 1, (rows, 1), generator=generator)
    tree = {"input_ids": ids, "attention_mask": (torch.arange(text.length) < ends).long()}
    tree = {part: tensor.to(device) for part, tensor in tree.items()}
    images = torch.randn(batches[1] * steps, 3, image.length, image.length, generator=generator).to(device)
    precision = "bf16" if cuda else "float32"
    return {
        f"{members} BERT-shaped networks, width {text.width}, {text.depth} blocks, {text.length} tokens,"
        f" batch {batches[0]}, AdamW, {precision}": problem(
            batches[0], 4, lambda: TextEncoder(text), tree, output="logits"
        ),
        f"{members} {name}, width {image.width}, {image.depth} blocks, batch {batches[1]}, AdamW, {precision}": problem(
            batches[1], 10, vit, images
        ),
    }


def _vision_transformer(size: Size, cuda: bool) -> tuple[Callable[[], nn.Module], str]:
    """Return a factory and a name: timm's tiny one where it is installed and of that size, else the one of this file."""
    if cuda:
        try:
            import timm
        except (ImportError, RuntimeError):  # torchvision of another build than torch
            pass
        else:
            options = {"img_size": size.length, "num_classes": 10}
            return lambda: timm.create_model("vit_tiny_patch16_224", **options), "ViT of timm"
    return lambda: ImageEncoder(size), "ViT"
