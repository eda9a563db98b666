"""The autoencoder in float64 with NumPy: convolutions are sums of shifted products."""

import numpy as np


def convolution(x, weight, bias, stride=1, pad=(0, 0, 0, 0)):
    """Return a 3x3 or 1x1 convolution; ``pad`` has rows above and below, then columns at the left and the right."""
    x = np.pad(x, ((0, 0), (0, 0), pad[:2], pad[2:]))
    size = weight.shape[2]
    height, width = (x.shape[2] - size) // stride + 1, (x.shape[3] - size) // stride + 1
    out = np.zeros((x.shape[0], weight.shape[0], height, width))
    for row in range(size):
        for column in range(size):
            seen = x[:, :, row : row + stride * height : stride, column : column + stride * width : stride]
            out += np.einsum("nchw,oc->nohw", seen[:, :, :height, :width], weight[:, :, row, column])
    return out + bias[None, :, None, None]


class PlainVae:
    """Encoder and decoder with a state dict of published names."""

    def __init__(self, state, levels, blocks, groups, epsilon):
        self.state = {name: tensor.double().numpy() for name, tensor in state.items()}
        self.levels, self.blocks, self.groups, self.epsilon = levels, blocks, groups, epsilon

    def encode(self, x):
        x = self.conv("encoder.conv_in", x)
        for level in range(self.levels):
            for block in range(self.blocks):
                x = self.residual(f"encoder.down.{level}.block.{block}", x)
            if level < self.levels - 1:
                name = f"encoder.down.{level}.downsample.conv"
                x = convolution(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"], 2, (0, 1, 0, 1))
        x = self.conv("encoder.conv_out", self.silu(self.norm("encoder.norm_out", self.middle("encoder.mid", x))))
        return self.conv("quant_conv", x)

    def decode(self, z):
        x = self.middle("decoder.mid", self.conv("decoder.conv_in", self.conv("post_quant_conv", z)))
        for level in reversed(range(self.levels)):
            for block in range(self.blocks + 1):
                x = self.residual(f"decoder.up.{level}.block.{block}", x)
            if level:
                x = self.conv(f"decoder.up.{level}.upsample.conv", x.repeat(2, axis=2).repeat(2, axis=3))
        return self.conv("decoder.conv_out", self.silu(self.norm("decoder.norm_out", x)))

    def middle(self, name, x):
        x = self.residual(f"{name}.block_1", x)
        normed = self.norm(f"{name}.attn_1.norm", x)
        q, k, v = (self.conv(f"{name}.attn_1.{part}", normed) for part in "qkv")
        scores = np.einsum("nchw,ncij->nhwij", q, k) * q.shape[1] ** -0.5
        weights = np.exp(scores - scores.max(axis=(3, 4), keepdims=True))
        weights /= weights.sum(axis=(3, 4), keepdims=True)
        x = x + self.conv(f"{name}.attn_1.proj_out", np.einsum("nhwij,ncij->nchw", weights, v))
        return self.residual(f"{name}.block_2", x)

    def residual(self, name, x):
        hidden = self.conv(f"{name}.conv1", self.silu(self.norm(f"{name}.norm1", x)))
        hidden = self.conv(f"{name}.conv2", self.silu(self.norm(f"{name}.norm2", hidden)))
        if f"{name}.nin_shortcut.weight" in self.state:
            x = self.conv(f"{name}.nin_shortcut", x)
        return x + hidden

    def conv(self, name, x):
        weight = self.state[f"{name}.weight"]
        pad = (weight.shape[2] // 2,) * 4
        return convolution(x, weight, self.state[f"{name}.bias"], 1, pad)

    def norm(self, name, x):
        grouped = x.reshape(x.shape[0], self.groups, -1)
        mean, variance = grouped.mean(axis=2, keepdims=True), grouped.var(axis=2, keepdims=True)
        normed = ((grouped - mean) / np.sqrt(variance + self.epsilon)).reshape(x.shape)
        shape = (1, -1, 1, 1)
        return normed * self.state[f"{name}.weight"].reshape(shape) + self.state[f"{name}.bias"].reshape(shape)

    @staticmethod
    def silu(x):
        return x / (1 + np.exp(-x))
