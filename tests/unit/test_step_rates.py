"""The product whose rate the step-cost benchmark measures in fp8."""

import torch

from windowed_mtp.engines.vllm.step_cost import fp8_product


def test_an_fp8_product_is_that_of_its_operands():
    torch.manual_seed(0)
    matrix = torch.randn(32, 32).to(torch.float8_e4m3fn)
    made = fp8_product(matrix, torch.tensor(1.0))
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), matrix.float() @ matrix.float().t(), rtol=0.01, atol=0.05)
