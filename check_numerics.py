"""
The proofs that the three scripts compute the same thing.
Run: python check_numerics.py results.json [--device cpu|cuda|mps] [--only NAME ...]
Each check asks one question of the scripts' own classes and functions and computes both sides of
the answer. It needs neither data, tokenizer nor network. Exit code 0: all pass, 1: one fails,
2: bad arguments.
"""

import contextlib
import functools
import importlib
import io
import itertools
import logging
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from operator import eq, ge, gt, le, lt
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

import run
from common import (PRESETS, VOCAB_SIZE, ArgumentParser, GPTConfig, TokenDataset, UpdateSampler,
                    UserError, canonical_shapes, check_shapes, check_writable, choose_compile,
                    end_process_group, environment, eval_batches, generate, get_device,
                    init_weights, keep_freed_memory, load_batches, load_canonical, load_checkpoint,
                    mix_seeds, rendezvous, run_cli, save_checkpoint, to_canonical, write_json)

orig = importlib.import_module("00_orig")
single = importlib.import_module("01_opt_single_gpu")
multi = importlib.import_module("02_opt_multi_gpu_ddp")

# -----------------------------------------------------------------------------
# Checks: a registry and a runner

RELATIONS = {"<": lt, "<=": le, "==": eq, ">=": ge, ">": gt}
CHECKS = {}


class Skip(Exception):
    """This check makes no sense here; the message says why."""


@dataclass
class Check:
    """A question and who answers it: function(device) yields (what, measured, relation, limit)."""
    name: str
    optimisation: int | None  # its number in the ladder
    question: str
    devices: tuple
    function: Callable

    def run(self, device):
        """One of "checks" in results.json; passed if all measured keep their limits, no errors."""
        start, precision = time.perf_counter(), torch.get_float32_matmul_precision()
        measured, tolerance, kept, skipped, note = {}, {}, [], False, ""
        torch.manual_seed(0)
        try:
            if device.type not in self.devices:
                raise Skip(f"asked on {' and '.join(self.devices)} only")
            for what, value, relation, limit in self.function(device):
                assert what not in measured, f"{what!r} is measured twice"
                kept.append(bool(RELATIONS[relation](value, limit)))
                measured[what], tolerance[what] = for_json(value), f"{relation} {for_json(limit)}"
        except Skip as reason:
            skipped, note = True, str(reason)
        except Exception as error:
            kept.append(False)
            note = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            torch.set_float32_matmul_precision(precision)
        return {"name": self.name, "optimisation": self.optimisation, "question": self.question,
                "measured": measured, "tolerance": tolerance,
                "passed": None if skipped else bool(kept) and all(kept), "skipped": skipped,
                "note": note, "seconds": round(time.perf_counter() - start, 2)}


def ladder():
    """{name of an optimisation: its number}, from the docstrings of the scripts."""
    lines = [s for s in (single.__doc__ + multi.__doc__).splitlines() if s.startswith("[")]
    return {name.strip(): int(number) for line in lines
            for number, name in re.findall(r"\[(\d+)\] ([^\[]+)", line)}


def check(optimisation, question, devices=("cpu", "cuda", "mps")):
    """Register a generator function as a check; optimisation is a name in the ladder, or None."""
    def register(function):
        number = ladder()[optimisation] if optimisation else None
        CHECKS[function.__name__] = Check(function.__name__, number, question, devices, function)
        return function
    return register


def for_json(value):
    """A short number, or text where JSON has no number for it."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value if isinstance(value, int) else str(value)


def print_check(result):
    number = f"[{result['optimisation']}] " if result["optimisation"] else ""
    verdict = "skip" if result["skipped"] else "pass" if result["passed"] else "FAIL"
    print(f"{verdict}  {number}{result['name']}: {result['question']} ({result['seconds']:.1f} s)")
    for what, value in result["measured"].items():
        print(f"        {what:<52} {value!s:>12}   {result['tolerance'][what]}")
    if result["note"]:
        print(f"        {result['note']}")


# -----------------------------------------------------------------------------
# Helpers: small models and their gradients, differences, the scripts' own training

# 97 rows become 128
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)


def double(device):
    """The most precise dtype of device."""
    return torch.float32 if device.type == "mps" else torch.float64


def eps(device):
    return torch.finfo(double(device)).eps


def loss_limit(device):
    """How closely gradients agree whose sums differ in their order; the loss is always float32."""
    return 1e-4 if device.type == "mps" else 1e-6


def random_weights(config):
    """Canonical weights, none 0 or 1, attention far from uniform: a term left out would show."""
    generator = torch.Generator().manual_seed(0)
    norms = ("1.weight", "2.weight", "f.weight")
    return {name: torch.randn(shape, generator=generator) * 0.3 + name.endswith(norms)
            for name, shape in canonical_shapes(config).items()}


def build(script, device, config=SMALL, dtype=torch.float32):
    """script's GPT with random_weights, in training mode."""
    model = script.GPT(config).to(device, dtype)
    load_canonical(model, random_weights(config))
    return model


def tokens(device, B=8, T=16, vocab_size=SMALL.vocab_size, seed=1):
    """(x, y), each (B, T), of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (B, T + 1), generator=generator).to(device)
    return ids[:, :-1], ids[:, 1:]


def canonical(model, value=lambda p: p, prefix=""):
    """value(p) of each parameter of a model of shape SMALL, in canonical layout."""
    return to_canonical({n: value(p) for n, p in model.named_parameters(prefix)}, SMALL.vocab_size)


def gradients(model, *losses, prefix=""):
    """Canonical gradients of the losses' sum, by backward passes one after the other."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return canonical(model, lambda p: p.grad, prefix)


def value_and_gradients(function, *inputs):
    """[Y, gradients of L = sum(Y^2) with respect to the inputs] of Y = function(*inputs)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def largest(values):
    """max() of numbers, but nan if one is nan."""
    return float(np.max(list(values)))


def difference(a, b):
    """Largest absolute difference of two tensors, or of two lists of tensors."""
    if isinstance(a, (list, tuple)):
        return largest(difference(s, t) for s, t in zip(a, b, strict=True))
    return (a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item()


def relative(a, b):
    """Largest norm of a difference over the norm, of two dicts of tensors.

    A tensor that should be 0 (the gradient of the keys' bias) is measured against a thousandth
    of the largest norm.
    """
    norms = {name: b[name].double().norm() for name in a.keys() | b.keys()}
    floor = max(norms.values()) / 1000
    return largest(((a[name].double() - b[name].double()).norm() / max(norm, floor)).item()
                   for name, norm in norms.items())


def training(script, device, folder=None, **settings):
    """(losses, gradient norms and validation loss, final checkpoint) of ten updates by script.main.

    The model has SMALL's shape, the data are made-up shards. None if nothing was written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return training(script, device, folder, **settings)
    out = Path(folder) / "run"
    settings = dict(
        max_steps=10, total_batch_size=128, batch_size=4, block_size=16, learning_rate=1e-2,
        warmup_steps=2, eval_every=10, sample_every=0, save_every=10, out=str(out),
        device=device.type, **write_inputs(Path(folder))) | settings
    if hasattr(script.Config, "dtype"):
        settings = {"dtype": "float32", "compile": "off"} | settings
    with around_main():
        script.main(script.Config(**settings))
    if not out.is_dir():
        return None
    rows = run.read_metrics(out / "metrics.jsonl")
    numbers = [row[key] for key in ("loss", "grad_norm", "val_loss") for row in rows if key in row]
    return numbers, load_checkpoint(out / "step_000010.pt")


def write_inputs(folder):
    """Write shards and first weights to folder; the settings that name them."""
    ids = np.random.default_rng(0).integers(50, size=2000).astype(np.uint16)  # 50 ids: to be learnt
    np.save(folder / "train_0.npy", ids[:1800])
    np.save(folder / "val_0.npy", ids[1800:])
    first = {"step": 0, "model": init_weights(SMALL, 0), "model_config": asdict(SMALL)}
    save_checkpoint(folder / "first.pt", first)
    return {"data": str(folder), "init": str(folder / "first.pt")}


@contextlib.contextmanager
def around_main():
    """Keep a script's main() from printing, and from what takes seconds: the peak, the plot."""
    with contextlib.ExitStack() as stack:
        stack.callback(end_process_group)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(run, "peak_flops", lambda *_: (1e12, "not asked")))
        stack.enter_context(mock.patch.object(run, "plot_metrics", lambda out: None))
        yield


def apart(a, b):
    """Largest relative difference of the numbers of two trainings."""
    return largest(abs(x - y) / y for x, y in zip(a[0], b[0], strict=True))


# -----------------------------------------------------------------------------
# The model


def attention(script, n_head):
    """The attention of script's class between its projections, of q, k, v, each (B, T, C)."""
    def function(q, k, v):
        module = script.CausalSelfAttention(GPTConfig(1, n_head, q.size(2)))
        given = {"c_q": q, "c_k": k, "c_v": v, "c_attn": torch.cat([q, k, v], dim=2)}
        for name, layer in module.named_children():
            layer.forward = lambda x, value=given.get(name): x if value is None else value
        return module(q)
    return function


def random_qkv(device, dtype, B, n_head, T, head_size):
    return [torch.randn(B, T, n_head * head_size).to(device, dtype) for _ in range(3)]


@check("merged QKV", "Does one Linear(C, 3C) give the attention and gradients of three?")
def merged_qkv(device):
    dtype, prefix, limit = double(device), "h.0.attn", 200 * eps(device)
    three, one = (s.CausalSelfAttention(SMALL).to(device, dtype) for s in (orig, single))
    joined = canonical(three, prefix=prefix)
    one.load_state_dict({name.removeprefix(f"{prefix}."): t for name, t in joined.items()})
    x = torch.randn(2, 9, 32).to(device, dtype)
    results = [value_and_gradients(module, x) for module in (one, three)]
    yield "output and gradient of the input", difference(*results), "<=", limit
    grads = [gradients(m, m(x).square().sum(), prefix=prefix) for m in (one, three)]
    yield "gradients of the weights, relative", relative(*grads), "<=", limit
    yield "parameters more", run.count_parameters(one) - run.count_parameters(three), "==", 0


@check("SDPA", "Is SDPA the hand-written causal attention, also in gradients of L = sum(Y^2)?")
def sdpa(device):
    def compare(qkv, n_head):
        return [value_and_gradients(attention(script, n_head), *qkv) for script in (single, orig)]
    dtype = double(device)
    (y, *grads), (y0, *grads0) = compare(random_qkv(device, dtype, 2, 2, 5, 4), 2)
    yield "2x2x5x4: values", difference(y, y0), "<=", 10 * eps(device)
    yield "2x2x5x4: gradients", difference(grads, grads0), "<=", 100 * eps(device)
    large = compare(random_qkv(device, dtype, 2, 4, 130, 32), 4)
    yield "2x4x130x32", difference(*large), "<=", 500 * eps(device)
    sliced = compare([t[:, ::2] for t in random_qkv(device, dtype, 3, 2, 22, 8)], 2)
    yield "3x2x11x8, not contiguous", difference(*sliced), "<=", 200 * eps(device)
    qkv = random_qkv(device, dtype, 2, 4, 65, 16)
    exact = compare(qkv, 4)[1]
    for low, limit in (torch.float32, 2e-5), (torch.bfloat16, 0.2):
        if low == torch.bfloat16 and device.type == "mps":
            continue  # never trained in there
        for name, result in zip(("SDPA", "by hand"), compare([t.to(low) for t in qkv], 4)):
            yield f"{name} in {low}, from exact", difference(result, exact), "<=", limit


@check("SDPA", "Do tokens from a cut on leave all logits before it exactly as they were?")
def causality(device):
    config = replace(SMALL, block_size=257)
    low = [] if device.type == "mps" else [torch.bfloat16, torch.float16]  # see choose_dtype
    cuts = [(T, cut) for T in (1, 4, 5, 63, 64, 257) for cut in {min(4, T), T // 2, T - 1}]
    for script, dtype in itertools.product((orig, single), [torch.float32, *low]):
        model = build(script, device, config, dtype).eval()
        before, after = [], []
        for T, cut in cuts:
            idx = tokens(device, 2, T)[0]
            changed = torch.cat([idx[:, :cut], (idx[:, cut:] + 1) % config.vocab_size], dim=1)
            with torch.no_grad():
                change = (model(idx) - model(changed)).abs()
            before += change[:, :cut].flatten().tolist()
            after += change[:, cut:].amax(dim=(0, 2)).tolist()
        yield f"{script.__name__}, {dtype}: change before the cut", largest(before), "==", 0.0
        yield f"{script.__name__}, {dtype}: change after it", float(np.min(after)), ">", 0.1


def softmax_by_blocks(scores, values, size):
    """(softmax(scores) @ values, m, Z), size positions at a time, as FlashAttention does it: the
    running maximum m, denominator Z and weighted sum are kept, the latter two rescaled by
    exp(m - m') (Milakov and Gimelshein, 2018)."""
    m = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    Z = total = 0.0
    for block, rows in zip(scores.split(size, dim=-1), values.split(size, dim=-2)):
        new = torch.maximum(m, block.amax(dim=-1, keepdim=True))
        rescale, weights, m = (m - new).exp(), (block - new).exp(), new
        Z = Z * rescale + weights.sum(dim=-1, keepdim=True)
        total = total * rescale + weights @ rows
    return total / Z, m, Z


@check("SDPA", "Does softmax by blocks, as in FlashAttention, give the hand-written attention?")
def online_softmax(device):
    dtype = double(device)
    q, k, v = random_qkv(device, dtype, 2, 1, 37, 8)
    future = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(future, -math.inf)
    by_hand = attention(orig, 1)(q, k, v)
    for size in (1, 5, 16, 64):
        by_blocks = softmax_by_blocks(scores, v, size)[0]
        yield f"blocks of {size}", difference(by_blocks, by_hand), "<=", 50 * eps(device)
    scores, values = torch.tensor([[[2.0, 5.0]], [[1.0, 0.0]]], dtype=dtype, device=device)
    y, m, Z = softmax_by_blocks(scores, values.mT, 1)
    expected = 1 / (1 + math.exp(3)), 5.0, 1 + math.exp(-3)
    off = largest(abs(a.item() - b) for a, b in zip((y, m, Z), expected))
    yield "scores 2, then 5: weight of the 2, m and Z off by", off, "<=", 1e-6


@check("SDPA", "SDPA applies dropout_p in any mode; does the model still have none in evaluation?")
def eval_dropout(device):
    q = torch.randn(2, 2, 9, 8).to(device)
    twice = [F.scaled_dot_product_attention(q, q, q, dropout_p=0.5) for _ in range(2)]
    yield "SDPA alone: two calls differ by", difference(*twice), ">", 0.1
    x = tokens(device)[0]
    for script in (orig, single):
        models = build(script, device, replace(SMALL, dropout=0.5)), build(script, device)
        twice = [models[0](x) for _ in range(2)]
        yield f"{script.__name__}: two calls in training differ by", difference(*twice), ">", 0.1
        less = difference(*(model.eval()(x) for model in models))
        yield f"{script.__name__}: evaluation less one without dropout", less, "==", 0.0


@check("native ops", "Are PyTorch's LayerNorm and GELU the hand-written ones, in gradients too?")
def native_ops(device):
    def norm(script):
        layer = script.LayerNorm(32).to(device)
        return lambda x, weight, bias: torch.func.functional_call(
            layer, {"weight": weight, "bias": bias}, x)
    x, *parameters = (torch.randn(s).to(device, double(device)) for s in ((4, 7, 32), (32,), (32,)))
    for scale in (1.0, 1e-3):  # at 1e-3 the variance is below eps
        results = [value_and_gradients(norm(s), x * scale, *parameters) for s in (single, orig)]
        limit = 2000 / scale * eps(device)
        yield f"LayerNorm, inputs of size {scale:g}", difference(*results), "<=", limit
    line = torch.linspace(-8, 8, 4001).to(x)
    results = [value_and_gradients(script.gelu, line) for script in (single, orig)]
    yield "GELU", difference(*results), "<=", 1000 * eps(device)
    from_erf = difference(single.gelu(line), line * 0.5 * (1 + torch.erf(line / math.sqrt(2))))
    yield "GELU from its erf form, to 4 digits", f"{from_erf:.4f}", "==", "0.0005"


@check(None, "Do 00, 01 and 02 give the same logits, loss and gradients?")
def same_gradients(device):
    reference, (x, y) = build(orig, device, dtype=double(device)), tokens(device)
    limit = loss_limit(device)
    for script in (single, multi):
        model, name = build(script, device, dtype=double(device)), script.__name__
        yield f"{name}: logits", difference(model(x), reference(x)), "<=", 1e4 * eps(device)
        yield f"{name}: loss", difference(model(x, y), reference(x, y)), "<=", limit
        grads = [gradients(m, m(x, y)) for m in (model, reference)]
        yield f"{name}: gradients, relative", relative(*grads), "<=", limit


@check(None, "Do ten updates by main() of 00, 01 and 02 print the same losses?", ("cpu", "cuda"))
def same_training(device):
    reference = training(orig, device)
    yield "first loss less last, of 00", reference[0][0] - reference[0][9], ">", 0.3
    limit = 1e-5 if device.type == "cpu" else 1e-2  # TF32 on CUDA
    for script in (single, multi):
        yield script.__name__, apart(training(script, device), reference), "<=", limit


# -----------------------------------------------------------------------------
# The padded vocabulary


@check("padded vocabulary", "Is the loss still that of 50257 rows, and is no pad id ever sampled?")
def padded_vocabulary(device):
    with torch.device("meta"):
        padded, plain = (script.GPT(GPTConfig(0, 12, 768)) for script in (single, orig))
    yield "rows more", padded.wte.weight.size(0) - plain.wte.weight.size(0), "==", 47
    more = run.count_parameters(padded) - run.count_parameters(plain)
    yield "parameters more", more, "==", 36096
    yield "ln 50304 - ln 50257", math.log(50304) - math.log(50257), ">=", 9e-4
    model = single.GPT(GPTConfig(1, 2, 16, block_size=16)).to(device)
    with torch.no_grad():  # ln_f gives (1, 0, 0, ...), so that logit i is weight[i, 0]
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.bias[0] = 1
        x, y = tokens(device, 1, 4, VOCAB_SIZE)
        apart_by = abs(model(x, y).item() - math.log(50257))
        yield "loss of equal logits from ln 50257", apart_by, "<=", 1e-5
        model.wte.weight[VOCAB_SIZE:, 0] = 100
        uncut = model.lm_head(model.ln_f(torch.zeros(1, 16, device=device)))
    yield "pad logits of 100: greedy over all rows takes", uncut.argmax().item(), ">=", VOCAB_SIZE
    for temperature in (0, 1.0):
        ids = generate(model, x, 12, torch.Generator().manual_seed(0), temperature)
        yield f"largest id at temperature {temperature:g}", ids.max().item(), "<", VOCAB_SIZE


@check("padded vocabulary", "Do pad rows get no gradient, stay 0, and stay out of checkpoints?")
def pad_rows(device):
    model, V = build(single, device), SMALL.vocab_size
    optimizer = torch.optim.AdamW(single.parameter_groups(model, 0.1), lr=1e-2)
    for _ in range(10):
        model.zero_grad()
        model(*tokens(device)).backward()
        optimizer.step()
    grad, pad = model.wte.weight.grad.abs(), model.wte.weight[V:].abs()
    yield "largest gradient of a real row", grad[:V].max().item(), ">", 0.01
    yield "largest gradient of a pad row", grad[V:].max().item(), "==", 0.0
    yield "largest pad weight after 10 updates", pad.max().item(), "==", 0.0
    weights = canonical(model)
    yield "rows in canonical layout", len(weights["wte.weight"]), "==", V
    try:
        refusal = str(model.load_state_dict(weights | {"lm_head.weight": weights["wte.weight"]}))
    except RuntimeError as error:
        refusal = str(error)
    named = "[97, 32]" in refusal and "[128, 32]" in refusal
    yield "97 rows put straight into 128: refused with both shapes", named, "==", True
    load_canonical(model, random_weights(SMALL))
    yield "converted and back", relative(canonical(model), random_weights(SMALL)), "==", 0.0


# -----------------------------------------------------------------------------
# Number formats


def round_tf32(x):
    """x (float32) to TF32's 10 fraction bits, to nearest, ties to even."""
    bits = x.view(torch.int32)
    return (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)


def measure_format(device, rounded):
    """(exponent bits, fraction bits) of a format; rounded(x) is the number in it nearest to x."""
    number = lambda x: rounded(torch.tensor(x, dtype=torch.float32, device=device)).item()
    fraction = max(p for p in range(1, 30) if number(1 + 2.0**-p) != 1)
    largest = max(e for e in range(1, 128) if math.isfinite(number(2.0**e)))
    return int(math.log2(largest + 1)) + 1, fraction


@check(None, "What do float32, TF32, bfloat16 and float16 hold?")
def number_formats(device):
    yield "TF32: exponent, fraction bits", str(measure_format(device, round_tf32)), "==", "(8, 10)"
    for name, bits in {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}.items():
        dtype, (exponent, fraction) = getattr(torch, name), bits
        measured = measure_format(device, lambda x: x.to(dtype).float())
        yield f"{name}: exponent, fraction bits", str(measured), "==", str(bits)
        info, bias, step = torch.finfo(dtype), 2 ** (exponent - 1) - 1, 2.0**-fraction
        yield f"{name}: eps", info.eps, "==", step
        yield f"{name}: smallest normal", info.tiny, "==", 2.0 ** (1 - bias)
        yield f"{name}: largest", info.max, "==", (2 - step) * 2.0**bias
    small, near = torch.tensor([1e-8, 1 + 2.0**-9], device=device)
    yield "1e-8 in float16", small.half().item(), "==", 0.0
    yield "1e-8 in bfloat16", small.bfloat16().item(), ">", 9.9e-9
    yield "1 + 2^-9 in bfloat16", near.bfloat16().item(), "==", 1.0


class TF32(TorchDispatchMode):
    """Every matmul below rounds its float32 operands to TF32, as tensor cores do: on any device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            args = (*args[:-2], *tree_map_only(torch.Tensor, round_tf32, args[-2:]))
        return function(*args, **(kwargs or {}))


@check("TF32", "How far do loss and gradients move when matmuls keep 10 fraction bits?")
def tf32(device):
    model, (x, y) = build(single, device), tokens(device)
    exact_loss = model(x, y)
    exact = gradients(model, exact_loss)
    real = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.set_float32_matmul_precision("high")  # put back by Check.run
    with contextlib.nullcontext() if real else TF32(), sdpa_kernel(SDPBackend.MATH):
        loss = model(x, y)
        moved = relative(gradients(model, loss), exact)
    yield "loss", difference(loss, exact_loss), "<=", 5e-3
    yield "gradients, relative, at most", moved, "<=", 2e-2
    yield "gradients, relative, at least", moved, ">", 1e-5
    yield "dtype of the weights", str(model.wte.weight.dtype), "==", "torch.float32"


@check("bfloat16", "Under autocast, what stays float32, and are losses the same?", ("cpu", "cuda"))
def bfloat16(device):
    model, (x, y) = build(single, device), tokens(device)
    exact = gradients(model, model(x, y))
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)  # as main() does
    loss = model(x, y)
    yield "dtypes of logits and loss", f"{model(x).dtype} {loss.dtype}", "==", \
        "torch.bfloat16 torch.float32"
    yield "gradients, relative", relative(gradients(model, loss), exact), "<=", 0.1
    result = training(single, device, dtype="bfloat16")
    yield "training", apart(result, training(orig, device)), "<=", 2e-2
    optimizer = result[1]["optimizer"]
    kept = [t for part in (result[1]["model"], optimizer["exp_avg"], optimizer["exp_avg_sq"])
            for t in part.values()]
    dtypes = " ".join({str(t.dtype) for t in kept})
    yield "dtypes of weights and AdamW's state", dtypes, "==", "torch.float32"


@check("bfloat16", "Why float32 weights: what is left of 100 updates of a thousandth each?")
def lost_updates(device):
    for dtype, relation, limit in (torch.float32, ">", 0.09), (torch.bfloat16, "==", 0.0):
        weight = nn.Parameter(torch.ones(8, dtype=dtype, device=device))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        yield f"{dtype} moved by", (weight.float().mean() - 1).item(), relation, limit


@check("bfloat16", "Does float16 keep small gradients and skip overflows?", ("cpu", "cuda"))
def loss_scaling(device):
    x = torch.randn(4, 8).to(device)
    for scale, relation, limit in (1.0, "==", 0.0), (2.0**16, ">", 0.99):
        layer, scaler, optimizer = scaled_layer(device, scale)
        with torch.autocast(device.type, torch.float16):
            y = layer(x)
        scaler.scale(y.float().sum() * 1e-9).backward()
        scaler.unscale_(optimizer)
        kept = layer.weight.grad.norm() / (x.half().float().sum(0) * 1e-9).norm()
        yield f"kept of a gradient of 1e-9 at scale {scale:g}", kept.item(), relation, limit
    for order, expected in (("unscale, clip", 1.0), ("clip, unscale", 1 / 1024)):
        layer, scaler, optimizer = scaled_layer(device, 1024.0)
        scaler.scale(100 * layer(x).sum()).backward()
        for action in order.split(", "):
            if action == "clip":
                nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            else:
                scaler.unscale_(optimizer)
        error = abs(layer.weight.grad.norm().item() / expected - 1)
        yield f"{order}: error of the norm", error, "<=", 1e-3
    layer, scaler, optimizer = scaled_layer(device, 1024.0)
    weights, scales = [layer.weight.detach().clone()], []
    for factor in (math.inf, 1.0, 1.0, 1.0):
        scaler.scale(layer(x).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(layer.weight.detach().clone())
        scales.append(scaler.get_scale())
    yield "overflow: weights moved by", difference(*weights[:2]), "==", 0.0
    yield "next update: weights moved by", difference(*weights[1:3]), ">", 0.0
    yield "1024: an overflow, 3 updates", str(scales), "==", "[512.0, 512.0, 512.0, 1024.0]"
    half = training(single, device, dtype="float16")
    yield "training", apart(half, training(orig, device)), "<=", 2e-2


def scaled_layer(device, scale):
    """(one output's weights, GradScaler that grows after three good updates, optimizer)"""
    layer = nn.Linear(8, 1, bias=False).to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=3)
    return layer, scaler, torch.optim.SGD(layer.parameters(), lr=0.1)


# -----------------------------------------------------------------------------
# Optimizer, batches, compilation, recomputation


@check("fused AdamW", "Are fused and plain AdamW the published formula, decay on matrices only?")
def fused_adamw(device):
    # the formula of Loshchilov and Hutter (2019)
    for name, fused in ("fused", True), ("plain", False):
        layer = nn.Linear(4, 3).to(device, double(device))
        optimizer = torch.optim.AdamW(single.parameter_groups(layer, 0.1), lr=1e-2,
                                      betas=(0.9, 0.95), eps=1e-8, fused=fused)
        state = {p: [p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)]
                 for p in layer.parameters()}
        for t in range(1, 11):
            for p, (w, m, v) in state.items():
                p.grad = g = torch.randn(p.shape).to(p) * 10.0 ** -t
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.95).add_(0.05 * g * g)
                w.mul_(1 - 1e-2 * 0.1 * (p.dim() == 2))
                w.sub_(1e-2 * m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
            optimizer.step()
        off = difference(list(state), [w for w, _, _ in state.values()])
        yield f"{name}: weights after 10 updates", off, "<=", 50 * eps(device)


@check(None, "Is the learning rate a warm-up from above 0, then a cosine, in 00, 01, 02?", ("cpu",))
def schedule(device):
    steps, expected = (0, 9, 10, 55, 100), "0.100000 1.000000 1.000000 0.550000 0.100000"
    for script in (orig, single, multi):
        config = script.Config(max_steps=100, warmup_steps=10, learning_rate=1.0, min_lr=0.1)
        rates = " ".join(f"{script.get_lr(step, config):.6f}" for step in steps)
        yield f"{script.__name__}: at updates {steps}", rates, "==", expected


@check("pinned memory", "Does reading ahead give the same batches in order?", ("cpu", "cuda"))
def pinned_memory(device):
    arrays = [np.arange(n, dtype=np.uint16) for n in (2000, 700)]
    data = TokenDataset(arrays, 16)
    batches = [[i, 3 * i % len(data)] for i in range(len(data))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU DataLoader reads ahead, but pins nothing
        ahead = list(load_batches(data, batches, device, pin_memory=True))
    expected = [[torch.stack(side) for side in zip(*(data[i] for i in b))] for b in batches]
    yield "largest difference", difference(ahead, expected), "==", 0.0
    one_ahead = largest(difference(x[:, 1:], y[:, :-1]) for x, y in ahead)
    yield "y is x one token ahead", one_ahead, "==", 0.0


@check("torch.compile", "Do ten updates by main() print the same losses when compiled?")
def compile(device):
    if choose_compile("auto", device)[0] == "off":
        raise Skip(f"torch.compile does not work here on {device.type}")
    eager, compiled = (training(single, device, compile=mode) for mode in ("off", "default"))
    yield "training", apart(compiled, eager), "<=", 1e-4 if device.type == "cpu" else 1e-2


@check("torch.compile", "Do evaluation and sampling leave the compiled graphs alone?")
def compile_graphs(device):
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    raw_model = build(single, device)
    model = torch.compile(raw_model, backend="eager", dynamic=False)
    model(*tokens(device)).backward()
    start = graphs()
    single.evaluate(raw_model, [tokens(device, B) for B in (4, 4, 3)])
    for T in (1, 5):
        generate(raw_model, tokens(device, 2, T)[0], 4, torch.Generator().manual_seed(0))
    model(*tokens(device)).backward()
    yield "graphs more, with raw_model", graphs() - start, "==", 0
    single.evaluate(model, [tokens(device, B) for B in (4, 3)])
    yield "graphs more, with the compiled model", graphs() - start, ">=", 2


@check("larger micro-batch", "Is the gradient that of micro-batches, weighted by their sizes?")
def micro_batch(device):
    model, limit = build(single, device, dtype=double(device)), loss_limit(device)
    x, y = tokens(device)
    whole = gradients(model, model(x, y))

    def off(*parts):  # (first sequence, last, weight) of each micro-batch
        losses = [model(x[a:b], y[a:b]) * weight for a, b, weight in parts]
        return relative(gradients(model, *losses), whole)
    yield "4 x 2", off(*((i, i + 2, 1 / 4) for i in range(0, 8, 2))), "<=", limit
    yield "4 x 2, not divided by 4", off(*((i, i + 2, 1) for i in range(0, 8, 2))), ">", 2.9
    yield "6 + 2, plain mean", off((0, 6, 1 / 2), (6, 8, 1 / 2)), ">", 0.05
    yield "6 + 2, weighted by count", off((0, 6, 3 / 4), (6, 8, 1 / 4)), "<=", limit
    if device.type != "mps":
        a, b = (training(single, device, batch_size=B) for B in (8, 2))
        yield "training, 8 against 4 x 2", apart(a, b), "<=", 1e-5 if device.type == "cpu" else 1e-2


@check("recomputation", "Are losses unchanged by it, also with dropout?", ("cpu", "cuda"))
def recomputation(device):
    def count(part):
        forward = single.MLP.forward
        with mock.patch.object(single.MLP, "forward", autospec=True, side_effect=forward) as calls:
            return training(single, device, dropout=0.2, recompute=part), calls.call_count
    off, calls = count("off")
    for part in ("mlp", "block"):
        result, more_calls = count(part)
        limit = 1e-6 if device.type == "cpu" else 1e-2  # sums in another order on CUDA
        yield f"{part}: training", apart(result, off), "<=", limit
        yield f"{part}: MLPs computed again", more_calls - calls, "==", 10 * 2 * SMALL.n_layer


@check("memory reuse", "Is memory kept, and what was left in it never read?", ("cpu",))
def memory_reuse(device):
    model, (x, y) = build(single, device), tokens(device)
    expected = gradients(model, model(x, y))
    keep_freed_memory()
    left = [torch.full((2**k,), math.nan) for k in range(25) for _ in range(4)]  # up to 64 MiB
    del left
    again = relative(gradients(model, model(x, y)), expected)
    yield "gradients in used memory, relative", again, "<=", 1e-6
    if sys.platform == "linux":
        import resource  # not on Windows

        faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = faults()
        for _ in range(4):
            torch.zeros(2**24)
        yield "page faults of 4 x 64 MiB, again", faults() - start, "<=", 64


# -----------------------------------------------------------------------------
# Processes


def on_rank(rank, world_size, folder):
    """What one of the processes of two_ranks does; what it sees goes to folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform != "win32":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    group = lambda name: {"store": dist.FileStore(str(folder / name), world_size), "rank": rank,
                          "world_size": world_size, "timeout": timedelta(minutes=2)}
    dist.init_process_group("gloo", **group("first"))
    seen = rank_results(rank, world_size)
    end_process_group()
    own = folder / f"rank{rank}"
    own.mkdir()
    with mock.patch.object(multi, "rendezvous", lambda: group("second")):
        seen["training"] = training(multi, torch.device("cpu"), own, batch_size=2)
    seen["files"] = sorted(path.name for path in own.glob("run/*"))
    torch.save(seen, folder / f"rank{rank}.pt")


def rank_results(rank, world_size):
    """Gradients of an update of 2 ranks x 2 x 2 sequences, and an evaluation, by parts of 02."""
    x, y = tokens(torch.device("cpu"))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    raw_model = build(multi, "cpu")
    model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True)
    parts = UpdateSampler(8, 8, 2, seed=5, rank=rank, world_size=world_size)
    seen = {"group": f"{dist.get_rank()} {dist.get_world_size()} {total.item():g}", "grads": [],
            "parts": list(itertools.islice(parts, 2))}
    for micro_step, part in enumerate(seen["parts"]):
        model.require_backward_grad_sync = micro_step == 1  # as main() does
        (model(x[part], y[part]) / 2).backward()
        seen["grads"].append(canonical(raw_model, lambda p: p.grad))
    batches = [(x[i], y[i]) for i in eval_batches(5, 2, rank, world_size)]
    return seen | {"eval": multi.evaluate(raw_model, batches)}


@functools.cache
def two_ranks():
    """What each of two processes saw (gloo, loopback); they are started once for all checks."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        torch.multiprocessing.spawn(on_rank, (2, Path(folder)), nprocs=2)
        return [torch.load(Path(folder) / f"rank{rank}.pt", "cpu", weights_only=True)
                for rank in range(2)]


@contextlib.contextmanager
def one_process():
    dist.init_process_group("gloo", **rendezvous())
    try:
        yield
    finally:
        end_process_group()


@check("process group", "Do two processes see each other, one alone itself?", ("cpu",))
def process_group(device):
    for rank, seen in enumerate(two_ranks()):
        yield f"rank {rank}: rank, world size, sum of 1 and 2", seen["group"], "==", f"{rank} 2 3"
    with one_process():
        yield "alone: rank, world size", f"{dist.get_rank()} {dist.get_world_size()}", "==", "0 1"


@check("each rank its own part", "Is an update the same sequences however it is split?", ("cpu",))
def rank_parts(device):
    expected = [sorted(part) for part in itertools.islice(UpdateSampler(50, 24, 24, seed=5), 25)]
    uses = set(np.bincount(np.concatenate(expected), minlength=50).tolist())
    yield "25 updates of 24 of 50 sequences: uses of each", str(uses), "==", "{12}"
    wrong = 0
    for B, world_size in (1, 1), (3, 1), (3, 2), (2, 4), (6, 4):
        streams = [iter(UpdateSampler(50, 24, B, seed=5, rank=rank, world_size=world_size))
                   for rank in range(world_size)]
        for update in expected:
            read = [i for s in streams for _ in range(24 // (B * world_size)) for i in next(s)]
            wrong += sorted(read) != update
    yield "updates that differ, of 5 x 25", wrong, "==", 0
    ours = sorted(i for rank in range(4) for batch in eval_batches(10, 2, rank, 4) for i in batch)
    yield "evaluation of 10 on 4 ranks", str(ours), "==", str(list(range(10)))
    theirs = [DistributedSampler(range(10), 4, rank, shuffle=False) for rank in range(4)]
    yield "DistributedSampler counts", sum(len(list(part)) for part in theirs), "==", 12
    masks = []
    for rank in (0, 1):
        torch.manual_seed(mix_seeds(1337, 0, rank))
        masks.append(F.dropout(torch.ones(64)))
    yield "dropout masks of two ranks differ by", difference(*masks), ">", 0.0


@check("DDP", "Do two processes with accumulation give one gradient, exchanged once?", ("cpu",))
def ddp_gradients(device):
    ranks, model, (x, y) = two_ranks(), build(orig, device), tokens(device)
    read = sorted(i for seen in ranks for part in seen["parts"] for i in part)
    yield "sequences read", str(read), "==", str(list(range(8)))
    for rank, seen in enumerate(ranks):
        part = seen["parts"][0]
        off = relative(seen["grads"][0], gradients(model, model(x[part], y[part]) / 2))
        yield f"rank {rank}, first micro-step: from its own gradient", off, "<=", 1e-5
    last = [seen["grads"][1] for seen in ranks]
    yield "last micro-step: rank 0 from rank 1", relative(*last), "==", 0.0
    off = relative(last[0], gradients(model, model(x, y)))
    yield "last micro-step: from 00's gradient of all 8", off, "<=", 1e-5
    off = apart(ranks[0]["training"], training(orig, device))
    yield "main() on 2 ranks: training", off, "<=", 1e-5


@check("reduced metrics", "Do two unequal ranks report the mean over all tokens?", ("cpu",))
def reduced_metrics(device):
    x, y = (t[:5] for t in tokens(device))
    with torch.no_grad():
        log_p = build(orig, device)(x).double().log_softmax(-1)
    nats = -log_p.gather(2, y[..., None])  # (5, T, 1)
    for rank, seen in enumerate(two_ranks()):
        off = abs(seen["eval"]["val_loss"] - nats.mean().item())
        yield f"rank {rank}: from the mean over all", off, "<=", 1e-5
        yield f"rank {rank}: tokens", seen["eval"]["val_tokens"], "==", nats.numel()
    shares = [sum(eval_batches(5, 2, rank, 2), []) for rank in range(2)]
    off = difference(torch.stack([nats[share].mean() for share in shares]).mean(), nats.mean())
    yield "mean of the ranks' means: off by", off, ">", 1e-2


@check("one writer", "Does rank 0 write the run folder, and rank 1 nothing?", ("cpu",))
def one_writer(device):
    first, second = two_ranks()
    expected = {"run.json", "metrics.jsonl", "summary.json", "step_000010.pt"}
    yield f"rank 0: missing of {len(expected)} files", len(expected - {*first["files"]}), "==", 0
    yield "rank 1: files", len(second["files"]), "==", 0


@check(None, "Is a checkpoint the same if the model was compiled, in DDP, or both?", ("cpu",))
def checkpoint_keys(device):
    compiled = functools.partial(torch.compile, backend="eager")
    wrappings = {"plain": lambda m: m, "compiled": compiled, "DDP": DistributedDataParallel,
                 "compiled DDP": lambda m: compiled(DistributedDataParallel(m)),
                 "DDP of compiled": lambda m: DistributedDataParallel(compiled(m))}
    x, y = tokens(device)
    with one_process():
        for name, wrap in wrappings.items():
            raw_model = build(multi, device)
            model = wrap(raw_model)
            saved, fresh = canonical(raw_model), orig.GPT(SMALL)
            check_shapes(saved, SMALL, name)  # raises unless the keys are the canonical ones
            load_canonical(fresh, saved)
            yield f"{name}: logits from those of 00", difference(model(x), fresh(x)), "<=", 1e-4
            prefixed = any("module." in k or "_orig_mod." in k for k in model.state_dict())
            yield f"{name}: the wrapper's own keys have a prefix", prefixed, "==", name != "plain"
            del model  # before its process group


# -----------------------------------------------------------------------------
# Randomness and rounding


@check(None, "Does a seed give the same numbers, and does one more draw change all that follow?")
def seeds(device):
    def draw(*sizes):
        torch.manual_seed(123)
        return torch.cat([torch.randn(size, device=device) for size in sizes])

    def ids(calls, n):
        torch.manual_seed(123)
        weights = torch.arange(1.0, 11.0, device=device)
        return torch.cat([torch.multinomial(weights, n, replacement=True) for _ in range(calls)])
    yield "six numbers, same seed", difference(draw(6), draw(6)), "==", 0.0
    unchanged = (draw(6) == draw(1, 6)[1:]).sum().item()
    yield "six numbers, one draw before: of them unchanged", unchanged, "==", 0
    same = (ids(1, 20) == ids(20, 1)).sum().item()
    yield "20 ids at once or singly: of them equal", same, "<", 20


@check(None, "Do evaluation and sampling leave the random stream of training alone?")
def own_generators(device):
    modules = [torch] if device.type == "cpu" else [torch, getattr(torch, device.type)]
    for script in (orig, single):
        name, model = script.__name__, build(script, device, replace(SMALL, dropout=0.1))
        sample = lambda seed: generate(model, tokens(device, 2, 3)[0], 8,
                                       torch.Generator().manual_seed(seed), top_k=50)
        before = [module.get_rng_state() for module in modules]
        first = sample(1)
        script.evaluate(model, [tokens(device)])
        still = difference([module.get_rng_state() for module in modules], before)
        yield f"{name}: stream moved by", still, "==", 0.0
        same = f"{first.equal(sample(1))} {first.equal(sample(2))}"
        yield f"{name}: same ids from the same, another seed", same, "==", "True False"
        yield f"{name}: in training mode afterwards", model.training, "==", True


@check(None, "Is floating-point addition associative?")
def addition_order(device):
    a, b, c = torch.tensor([1e8, -1e8, 1.0], device=device)
    yield "(1e8 - 1e8) + 1", ((a + b) + c).item(), "==", 1.0
    yield "1e8 + (-1e8 + 1)", (a + (b + c)).item(), "==", 0.0
    numbers = torch.rand(1000).to(device)
    orders = numbers, numbers.sort().values, numbers.sort(descending=True).values
    sums = [functools.reduce(torch.add, order).item() for order in orders]
    yield "1000 numbers, three orders: different sums", len(set(sums)), ">", 1
    exact = math.fsum(numbers.tolist())
    yield "from the exact sum, relative", max(abs(s / exact - 1) for s in sums), "<=", 1e-5


@check(None, "Is the first loss on random tokens that of equal chances, ln 50257?")
def first_loss(device):
    config, (x, y) = PRESETS["tiny"], tokens(device, 2, 64, VOCAB_SIZE)
    for script in (orig, single):
        model = script.GPT(config).to(device)
        load_canonical(model, init_weights(config, 1337))
        with torch.no_grad():
            off = abs(model(x, y).item() - math.log(VOCAB_SIZE))
        yield f"{script.__name__}: from {math.log(VOCAB_SIZE):.3f}", off, "<=", 0.3


# -----------------------------------------------------------------------------
# Accounting


def count_flops(script, config, T):
    """(forward, forward and backward) FLOPs per token as PyTorch counts them; none is computed."""
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), counter:
        x = torch.zeros(1, T, dtype=torch.long)
        loss = script.GPT(config)(x, x)
        forward = counter.get_total_flops()
        loss.backward()
        return forward / T, counter.get_total_flops() / T


@check(None, "Are 6 x weights + 12 L T C the FLOPs per token that PyTorch counts?", ("cpu",))
def flops(device):
    config, T = PRESETS["gpt2"], 1024
    for script, rows in (orig, VOCAB_SIZE), (single, 50304):
        forward, both = count_flops(script, config, T)
        formula = run.flops_per_token(replace(config, vocab_size=rows), T)
        yield f"{script.__name__}: counted over formula", both / formula, "==", 1.0
        yield f"{script.__name__}: forward and backward over forward", both / forward, "==", 3.0
    shapes, total = canonical_shapes(config), run.flops_per_token(config, T)
    del shapes["wpe.weight"]  # looked up, not multiplied
    rest = total - 6 * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    yield "attention: 12 L T C", rest, "==", 12 * 12 * T * 768
    yield "attention's share at T = 1024", rest / total, "<", 0.15


@check(None, "How many parameters are there, and how many bytes do they need in training?")
def parameters_and_bytes(device):
    with torch.device("meta"):
        model = orig.GPT(PRESETS["gpt2"])
    yield "GPT-2 124M, tied weights once", run.count_parameters(model), "==", 124439808
    yield "one tensor is embedding and head", model.wte.weight is model.lm_head.weight, "==", True
    model = build(single, device)
    optimizer = torch.optim.AdamW(single.parameter_groups(model, 0.1), fused=True)
    model(*tokens(device)).backward()
    optimizer.step()
    size = lambda tensors: sum(t.nbytes for t in tensors) / run.count_parameters(model)
    yield "bytes of weights, each", size(model.parameters()), "==", 4.0
    yield "bytes of gradients, each", size(p.grad for p in model.parameters()), "==", 4.0
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    yield "bytes of AdamW's state, each", size(moments), "==", 8.0


# -----------------------------------------------------------------------------
# Command


def parse_args(argv):
    parser = ArgumentParser(__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=Path("results.json"),
                        help="JSON file to write (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu",
                        help="where to check (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(CHECKS),
                        help="these checks alone: " + ", ".join(CHECKS))
    args = parser.parse_args(argv)
    if unknown := [name for name in args.only if name not in CHECKS]:
        raise UserError(f"--only {' '.join(unknown)}: no such check; there are {', '.join(CHECKS)}")
    check_writable(args.results)
    return args


def main(argv=None):
    args = parse_args(argv)
    device = get_device(args.device)
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    results, start = [], time.perf_counter()
    for name in args.only:
        results.append(CHECKS[name].run(device))
        print_check(results[-1])
    failed = [result["name"] for result in results if result["passed"] is False]
    skipped = sum(result["skipped"] for result in results)
    write_json(args.results, {"passed": not failed, "environment": environment(device),
                              "checks": results})
    print(f"{len(results) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped "
          f"in {time.perf_counter() - start:.0f} s; written to {args.results}"
          + f"; failed: {', '.join(failed)}" * bool(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_cli(main)
