"""What the head computes in, by the key, the backbone's precision and the device."""

import pytest
import torch

from partial_fc import build


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("device", "autocast", "expected"),
    [
        ("cuda", None, torch.float32),
        ("cuda", torch.bfloat16, torch.bfloat16),
        ("cuda", torch.float16, torch.bfloat16),
        ("cpu", None, torch.float32),
        ("cpu", torch.bfloat16, torch.bfloat16),
        ("cpu", torch.float16, torch.float32),
    ],
)
def test_auto_follows_the_backbone_where_the_device_is_fast_in_bf16(
    monkeypatch: pytest.MonkeyPatch, device: str, autocast: torch.dtype | None, expected: torch.dtype, fast: bool
):
    monkeypatch.setattr(build, "is_fast_in_bf16", lambda device: fast)
    found = build.matmul_dtype("auto", autocast, torch.device(device))
    assert found == (expected if fast else torch.float32)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert build.matmul_dtype(name, autocast, torch.device(device)) == dtype
