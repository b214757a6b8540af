"""The fp8 baseline's product of a few tokens is the one that PyTorch's would be."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "width"), [(6144, 4096), (4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_exact_arithmetic(rows: int, width: int, tokens: int, has_bias: bool) -> None:
    from w4a4.serve.baseline_fp8 import product, tile_for

    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tile = tile_for(rows, tokens)
    assert (tile is None) == (rows > 16384 and tokens > 32)
    if tile is None:
        return
    held = -(-tokens // 16) * 16
    x, weight = random(held, width).to(torch.float8_e4m3fn), random(rows, width).to(torch.float8_e4m3fn)
    x_scales, weight_scales = random(held, 1).abs() + 0.5, random(1, rows).abs() + 0.5
    bias = 100 * random(rows).bfloat16() if has_bias else None
    expected = (x[:tokens].double() @ weight.double().T) * x_scales[:tokens].double() * weight_scales.double()
    if bias is not None:
        expected += bias.double()
    got = product(x, x_scales, weight, weight_scales, bias, tokens, tile)
    assert got.shape == (tokens, rows) and got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() / expected.norm() < 4e-3
    for _ in range(3):
        assert torch.equal(product(x, x_scales, weight, weight_scales, bias, tokens, tile), got)
