"""FLOPs, parameters and bytes that are printed, against what torch counts."""

import pytest
import torch
from conftest import MICRO, SCRIPTS, script
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import common
import run


@pytest.mark.parametrize("name", SCRIPTS[:2])
def test_flops_per_token_are_those_that_torch_counts(name):
    shape, B, T = common.GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=128), 2, 96
    model = script(name).GPT(shape)
    idx = torch.randint(50257, (B, T + 1))
    # torch does not count SDPA's fused CPU kernel, so have it done with matmuls
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx[:, :-1], idx[:, 1:]).backward()
    expected = run.flops_per_token(shape, T) * B * T
    # 01 pads by 47 rows of 50,304
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)


def test_flops_of_124m_by_hand():
    gpt2 = common.PRESETS["gpt2"]
    matmul_parameters = 124_439_808 - 1024 * 768 - 12 * (4 * 768 + 9 * 768) - 2 * 768
    assert run.flops_per_token(gpt2, 1024) == 6 * matmul_parameters + 12 * 12 * 1024 * 768


@pytest.mark.parametrize("preset, millions", [
    ("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)])
def test_presets_are_openais_sizes(preset, millions):
    shapes = common.canonical_shapes(common.PRESETS[preset])
    parameters = sum(torch.Size(s).numel() for s in shapes.values())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.06)


def test_shared_parameters_count_once():
    model, padded = script("00_orig").GPT(MICRO), script("01_opt_single_gpu").GPT(MICRO)
    expected = sum(torch.Size(s).numel() for s in common.canonical_shapes(MICRO).values())
    assert run.count_parameters(model) == expected
    assert run.count_parameters(padded) == expected + 47 * 32


def saved_bytes(model, idx):
    """Bytes that autograd keeps for the backward pass, without parameters: (others, of logits)."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(idx[:, :-1], idx[:, 1:])
    large = idx[:, 1:].numel() * 50257
    logits = sum(n for n, t in kept.values() if n >= 2 * large)
    del loss
    return sum(n for n, _ in kept.values()) - logits, logits


@pytest.mark.parametrize("name, dtype", [
    ("00_orig", "float32"), ("01_opt_single_gpu", "float32"), ("01_opt_single_gpu", "bfloat16")])
def test_activation_estimate_is_near_what_autograd_keeps(name, dtype):
    shape, B, T = common.GPTConfig(n_layer=3, n_head=4, n_embd=128, block_size=128), 2, 128
    model = script(name).GPT(shape)
    autocast = torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32")
    model.forward = autocast(model.forward)
    settings = {} if name == "00_orig" else {"dtype": dtype}
    config = script(name).Config(block_size=T, **settings)
    blocks, estimated_logits = run.activation_bytes(config, shape, B)
    measured, logits = saved_bytes(model, torch.randint(50257, (B, T + 1)))
    if dtype == "bfloat16":  # autocast keeps its copies of the matmul weights too
        measured -= 2 * sum(p.numel() for name, p in model.named_parameters()
                            if p.dim() == 2 and name != "wpe.weight")
    assert blocks == pytest.approx(measured, rel=0.2)
    assert logits <= estimated_logits <= 3 * logits  # the rest of the estimate is the gradient's


@pytest.mark.parametrize("recompute, kept", [("off", 2), ("mlp", 2), ("block", 0)])
def test_the_attention_matrix_is_kept_where_it_is_compiled_for_the_cpu(recompute, kept):
    """In bfloat16 2 bytes for each pair of tokens and head."""
    shape, B, T = common.PRESETS["gpt2"], 3, 512
    settings = dict(device="cpu", block_size=T, dtype="bfloat16", recompute=recompute)
    config, eager = (script("01_opt_single_gpu").Config(compile=compile, **settings)
                     for compile in ("default", "off"))
    more = run.activation_bytes(config, shape, B)[0] - run.activation_bytes(eager, shape, B)[0]
    assert more == kept * B * 12 * 12 * T * T
