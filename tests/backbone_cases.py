"""Small networks with the shape of those that backbones are cut from."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer block before its norm, as in vision transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x, attn_mask=None):
        z = self.norm1(x)
        x = x + self.attn(z, z, z, need_weights=False)[0]
        return x + self.gamma * self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches, a class token, blocks, and a head on one token or on the mean."""

    def __init__(self, width: int = 8, depth: int = 3, classes: int = 5, pool: str = "token") -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width))
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.pool = pool

    def forward_features(self, x, attn_mask=None):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.pos_drop(x)
        if attn_mask is not None:
            raise AssertionError("no mask was given")
        return self.norm(self.blocks(x))

    def forward(self, x, attn_mask=None):
        x = self.forward_features(x, attn_mask=attn_mask)
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn(self.conv(x)))


class Resnet(nn.Module):
    """A stem, two stages, pooling and a linear layer."""

    def __init__(self, width: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.layer2 = nn.Sequential(Residual(width))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def images(count: int = 12) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def small_backbone() -> nn.Module:
    """Four inputs to six features, with statistics that training would move and dropout that it would draw."""
    generator = torch.Generator().manual_seed(5)
    linear = nn.Linear(4, 6)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return nn.Sequential(linear, nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
