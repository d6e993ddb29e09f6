"""
The proofs that the three scripts compute the same thing.
Run: python check_numerics.py results.json [--device cpu|cuda|mps] [--only NAME ...]
Each check asks one question of the scripts' own classes and functions and computes both sides of the answer. It needs
neither data, tokenizer nor network. Exit code 0: all pass, 1: one fails, 2: bad arguments.
"""

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import logging
import math
import operator
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable
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
from common import (PRESETS, VOCAB_SIZE, GPTConfig, TokenDataset, UpdateSampler, UserError, canonical_shapes,
                    check_shapes, choose_compile, environment, eval_batches, generate, get_device, init_weights,
                    keep_freed_memory, load_batches, load_canonical, load_checkpoint, mix_seeds, rendezvous, run_cli,
                    save_checkpoint, to_canonical)

orig = importlib.import_module("00_orig")
single = importlib.import_module("01_opt_single_gpu")
multi = importlib.import_module("02_opt_multi_gpu_ddp")

# -----------------------------------------------------------------------------
# Checks: a registry and a runner

RELATIONS = {"<=": operator.le, "<": operator.lt, "==": operator.eq, ">": operator.gt, ">=": operator.ge}
CHECKS = {}


class Skip(Exception):
    """This check makes no sense here; the message says why."""


@dataclass
class Check:
    """A question and the function that answers it: function(device) yields (what, measured, relation, tolerance)."""
    name: str
    optimisation: int | None  # its number in the ladder
    question: str
    devices: tuple
    function: Callable

    def run(self, device):
        """One object of "checks" in results.json; passed if every value keeps its tolerance and nothing raised."""
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
        return {"name": self.name, "optimisation": self.optimisation, "question": self.question, "measured": measured,
                "tolerance": tolerance, "passed": None if skipped else bool(kept) and all(kept), "skipped": skipped,
                "note": note, "seconds": round(time.perf_counter() - start, 2)}


def ladder():
    """{name of an optimisation: its number}, from the docstrings of the scripts."""
    lines = [line for line in (single.__doc__ + multi.__doc__).splitlines() if line.startswith("[")]
    return {name.strip(): int(number) for line in lines for number, name in re.findall(r"\[(\d+)\] ([^\[]+)", line)}


def check(name, optimisation, question, devices=("cpu", "cuda", "mps")):
    """Register a generator function as a check; optimisation is a name in the ladder, or None."""
    def register(function):
        number = ladder()[optimisation] if optimisation else None
        CHECKS[name] = Check(name, number, question, devices, function)
        return function
    return register


def for_json(value):
    """A number, or text where JSON has no number for it."""
    if isinstance(value, float):
        value = float(f"{value:.4g}") if abs(value) < 1e-2 or abs(value) >= 1e6 else round(value, 6)
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (bool, int)) else str(value)


def print_check(result):
    number = f"[{result['optimisation']}] " if result["optimisation"] else ""
    verdict = "skip" if result["skipped"] else "pass" if result["passed"] else "FAIL"
    print(f"{verdict}  {number}{result['name']}: {result['question']} ({result['seconds']:.1f} s)")
    for what, value in result["measured"].items():
        print(f"        {what:<52} {value!s:>12}   {result['tolerance'][what]}")
    if result["note"]:
        print(f"        {result['note']}")


# -----------------------------------------------------------------------------
# Helpers: small models, differences, the recipe

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)  # 97 rows become 128


def double(device):
    """The most precise dtype of device."""
    return torch.float32 if device.type == "mps" else torch.float64


def loss_limit(device):
    """How closely losses and gradients agree where sums differ in their order; all but the loss is double(device)."""
    return 1e-4 if device.type == "mps" else 1e-6


def random_weights(config, seed=0):
    """Canonical weights in which nothing is 0 or 1, and attention is far from uniform: a term left out would show."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 + (name.endswith(("1.weight", "2.weight", "f.weight")))
            for name, shape in canonical_shapes(config).items()}


def build(script, device, config=SMALL, dtype=torch.float32):
    """script's GPT with random_weights, in training mode."""
    model = script.GPT(config).to(device, dtype)
    load_canonical(model, random_weights(config))
    return model


def tokens(device, B=8, T=16, vocab_size=SMALL.vocab_size, seed=1):
    """(x, y), each (B, T), of random tokens."""
    ids = torch.randint(vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    return ids[:, :-1], ids[:, 1:]


def gradients(model, *losses):
    """Canonical gradients of the losses' sum, by backward passes one after the other."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return to_canonical({name: p.grad for name, p in model.named_parameters()}, model.config.vocab_size)


def weights_of(model):
    return to_canonical(dict(model.named_parameters()), model.config.vocab_size)


def relative_weights(a, b):
    """relative() without the keys' bias: its gradient is 0 but for rounding, of which AdamW makes whole steps."""
    without = [{name: torch.cat([w.chunk(3)[0], w.chunk(3)[2]]) if name.endswith("c_attn.bias") else w
                for name, w in weights.items()} for weights in (a, b)]
    return relative(*without)


def difference(a, b):
    """Largest absolute difference of two tensors, or of two lists of tensors."""
    if isinstance(a, (list, tuple)):
        return max(difference(s, t) for s, t in zip(a, b, strict=True))
    return (a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item()


def relative(a, b):
    """Largest norm of a difference over the norm, of two dicts of tensors.

    Tensors that should be 0 (the gradient of the keys' bias) are measured against a thousandth of the largest norm.
    """
    if a.keys() != b.keys():
        return math.inf
    floor = max(t.double().norm() for t in b.values()) / 1000
    return max(((a[k].double() - b[k].double()).norm() / max(b[k].double().norm(), floor)).item() for k in b)


def train(model, script, batches, call=None):
    """Losses of an update for each (x, y) of batches, by the recipe in script; call is the wrapped model, if it is."""
    config = script.Config(max_steps=len(batches), warmup_steps=2, learning_rate=1e-2, min_lr=1e-3)
    groups = script.parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = script.get_lr(step, config)
        loss = (model if call is None else call)(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return losses


def ten_batches(device):
    return [tokens(device, seed=seed) for seed in range(10)]


TRAINING = dict(max_steps=10, total_batch_size=128, batch_size=4, block_size=16, learning_rate=1e-2, warmup_steps=2,
                eval_every=10, sample_every=0, save_every=10)


def training(script, device, folder=None, **settings):
    """(losses, gradient norms, validation loss, final checkpoint) of ten updates by script.main itself.

    The model has 2 layers of 32 channels, the data are made-up shards: the same for all. None if nothing was written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return training(script, device, folder, **settings)
    out = Path(folder) / "run"
    if hasattr(script.Config, "dtype"):
        settings = {"dtype": "float32", "compile": "off"} | settings
    with around_main():
        script.main(script.Config(**TRAINING | settings | write_inputs(Path(folder)), out=str(out), device=device.type))
    if not out.is_dir():
        return None
    rows = run.read_metrics(out / "metrics.jsonl")
    updates = [row for row in rows if "loss" in row]
    return ([row["loss"] for row in updates], [row["grad_norm"] for row in updates], rows[-1]["val_loss"],
            load_checkpoint(out / "step_000010.pt"))


def write_inputs(folder):
    """Write shards and first weights to folder; the settings that name them."""
    ids = np.random.default_rng(0).integers(50, size=2000).astype(np.uint16)  # 50 of 128: that can be learnt
    np.save(folder / "train_0.npy", ids[:1800])
    np.save(folder / "val_0.npy", ids[1800:])
    config = replace(SMALL, vocab_size=128)
    save_checkpoint(folder / "first.pt", {"step": 0, "model": init_weights(config, 0), "model_config": asdict(config)})
    return {"data": str(folder), "init": str(folder / "first.pt")}


@contextlib.contextmanager
def around_main():
    """Keep a script's main() from printing, and from measuring the device's peak and plotting, which take seconds.

    Its process group ends after main(): a DDP model that outlives its gloo group can hang when it is freed.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())  # last, also on errors
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(run, "peak_flops", lambda *_: (1e12, "not asked")))
        stack.enter_context(mock.patch.object(run, "plot_metrics", lambda out: None))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        yield


def compare_trainings(name, a, b, limit):
    """Measured values of two results of training()."""
    for what, s, t in (("losses", a[0], b[0]), ("gradient norms", a[1], b[1]), ("validation loss", [a[2]], [b[2]])):
        yield f"{name}: {what}", max((abs(x - y) / y for x, y in zip(s, t, strict=True)), default=math.inf), "<=", limit


# -----------------------------------------------------------------------------
# The model


class Given(nn.Module):
    """A layer that returns what it was given, whatever comes in."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def attention(script, q, k, v, n_head, dropout=0.0):
    """The attention of script's class between its projections: q, k, v and the result are (B, T, C)."""
    module = script.CausalSelfAttention(GPTConfig(1, n_head, q.size(2), dropout=dropout))
    parts = {"c_attn": torch.cat([q, k, v], dim=2)} if hasattr(module, "c_attn") else {"c_q": q, "c_k": k, "c_v": v}
    for name, value in parts.items():
        setattr(module, name, Given(value))
    module.c_proj = nn.Identity()
    return module(q)


def value_and_gradients(function, *inputs):
    """[Y, gradients of L = sum(Y^2) with respect to the inputs] of Y = function(*inputs)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def random_qkv(device, dtype, B, n_head, T, head_size):
    return [torch.randn(B, T, n_head * head_size).to(device, dtype) for _ in range(3)]


@check("merged_qkv", "merged QKV", "Does one Linear(C, 3C) give the attention and gradients of three Linear(C, C)?")
def merged_qkv(device):
    config, dtype = GPTConfig(1, 4, 32), double(device)
    three, one = (script.CausalSelfAttention(config).to(device, dtype) for script in (orig, single))
    x = torch.randn(2, 9, 32).to(device, dtype)
    joined = to_canonical(dict(three.named_parameters(prefix="h.0.attn")))
    one.load_state_dict({name.removeprefix("h.0.attn."): t for name, t in joined.items()})
    (y3, dx3), (y1, dx1) = value_and_gradients(three, x), value_and_gradients(one, x)
    limit = 200 * torch.finfo(dtype).eps
    yield "output", difference(y1, y3), "<=", limit
    yield "gradient of the input", difference(dx1, dx3), "<=", limit
    for module, y in (three, three(x)), (one, one(x)):
        y.square().sum().backward()
    grads = [to_canonical({n: p.grad for n, p in m.named_parameters(prefix="h.0.attn")}) for m in (one, three)]
    yield "gradients of the weights, relative", relative(*grads), "<=", limit
    yield "parameters more", run.count_parameters(one) - run.count_parameters(three), "==", 0


@check("sdpa", "SDPA", "Is SDPA the hand-written causal attention, in values and in gradients of L = sum(Y^2)?")
def sdpa(device):
    compare = lambda qkv, n_head: [value_and_gradients(functools.partial(attention, script, n_head=n_head), *qkv)
                                   for script in (single, orig)]
    dtype = double(device)
    eps = torch.finfo(dtype).eps
    (y, *grads), (y0, *grads0) = compare(random_qkv(device, dtype, 2, 2, 5, 4), 2)
    yield "2x2x5x4: values", difference(y, y0), "<=", 10 * eps
    yield "2x2x5x4: gradients", difference(grads, grads0), "<=", 100 * eps
    yield "2x4x130x32", difference(*compare(random_qkv(device, dtype, 2, 4, 130, 32), 4)), "<=", 500 * eps
    sliced = [t[:, ::2] for t in random_qkv(device, dtype, 3, 2, 22, 8)]
    yield "3x2x11x8, not contiguous", difference(*compare(sliced, 2)), "<=", 200 * eps
    qkv = random_qkv(device, torch.float32, 2, 4, 65, 16)
    exact = compare([t.to(dtype) for t in qkv], 4)[1]
    for low, limit in (torch.float32, 2e-5), (torch.bfloat16, 0.2):
        if low == torch.bfloat16 and device.type == "mps":
            continue  # never trained in there
        for name, result in zip(("SDPA", "by hand"), compare([t.to(low) for t in qkv], 4)):
            yield f"{name} in {low}, from exact", difference(result, exact), "<=", limit


@check("causality", "SDPA", "Do tokens from a cut on leave all logits before it exactly as they were?")
def causality(device):
    config = replace(SMALL, block_size=257)
    low = [] if device.type == "mps" else [torch.bfloat16, torch.float16]  # never trained in on MPS: see choose_dtype
    for script, dtype in itertools.product((orig, single), [torch.float32, *low]):
        model = build(script, device, config, dtype).eval()
        before, after = 0.0, math.inf
        for T in (1, 4, 5, 63, 64, 257):
            for cut in {min(4, T), T // 2, T - 1}:
                idx = tokens(device, 2, T)[0]
                changed = torch.cat([idx[:, :cut], (idx[:, cut:] + 1) % config.vocab_size], dim=1)
                with torch.no_grad():
                    a, b = model(idx), model(changed)
                before = max(before, difference(a[:, :cut], b[:, :cut]) if cut else 0.0)
                after = min(after, difference(a[:, cut:], b[:, cut:]) if cut < T else math.inf)
        yield f"{script.__name__}, {dtype}: change before the cut", before, "==", 0.0
        yield f"{script.__name__}, {dtype}: change after it", after, ">", 0.1


def online_softmax(scores, values, size):
    """softmax(scores) @ values, size positions at a time, as FlashAttention keeps it (Milakov and Gimelshein, 2018):
    (result, m, Z) of running maximum m, denominator Z and weighted sum, the latter two rescaled by exp(m - m')."""
    m, Z = scores.new_full(scores.shape[:-1], -math.inf), scores.new_zeros(scores.shape[:-1])
    total = scores.new_zeros(*scores.shape[:-1], values.size(-1))
    for start in range(0, scores.size(-1), size):
        block = scores[..., start : start + size]
        new = torch.maximum(m, block.amax(dim=-1))
        rescale, weights = (m - new).exp(), (block - new[..., None]).exp()
        Z = Z * rescale + weights.sum(dim=-1)
        total = total * rescale[..., None] + weights @ values[..., start : start + size, :]
        m = new
    return total / Z[..., None], m, Z


@check("online_softmax", "SDPA", "Does softmax by blocks, as FlashAttention does it, give the hand-written attention?")
def blocks_of_softmax(device):
    dtype = double(device)
    q, k, v = random_qkv(device, dtype, 2, 1, 37, 8)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(37, 37, device=device).triu(1).bool(), -math.inf)
    for size in (1, 5, 16, 64):
        by_blocks = online_softmax(scores, v, size)[0]
        yield f"blocks of {size}", difference(by_blocks, attention(orig, q, k, v, 1)), "<=", 50 * torch.finfo(dtype).eps
    scores = torch.tensor([2.0, 5.0], dtype=dtype, device=device)
    y, m, Z = online_softmax(scores, torch.tensor([[1.0], [0.0]], dtype=dtype, device=device), 1)
    yield "scores 2, then 5: Z - (exp(-3) + 1)", abs(Z.item() - math.exp(-3) - 1), "<=", 1e-6
    yield "scores 2, then 5: maximum", m.item(), "==", 5.0
    yield "scores 2, then 5: weight of the 2", abs(y.item() - scores.softmax(0)[0].item()), "<=", 1e-6


@check("eval_dropout", "SDPA", "SDPA applies dropout_p in any mode; does the model still have none in evaluation?")
def eval_dropout(device):
    q = torch.randn(2, 2, 9, 8).to(device)
    twice = [F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True) for _ in range(2)]
    yield "SDPA alone: two calls differ by", difference(*twice), ">", 0.1
    x = tokens(device)[0]
    for script in (orig, single):
        model, without = build(script, device, replace(SMALL, dropout=0.5)), build(script, device)
        yield f"{script.__name__}: two calls in training differ by", difference(model(x), model(x)), ">", 0.1
        model.eval(), without.eval()
        yield f"{script.__name__}: evaluation less a model without dropout", difference(model(x), without(x)), "==", 0.0


@check("native_ops", "native ops", "Are PyTorch's LayerNorm and GELU the hand-written ones, in values and gradients?")
def native_ops(device):
    dtype = double(device)
    eps = torch.finfo(dtype).eps
    x, weight, bias = (torch.randn(shape).to(device, dtype) for shape in ((4, 7, 32), (32,), (32,)))
    norms = [script.LayerNorm(32).to(device, dtype) for script in (single, orig)]
    call = lambda norm: lambda x, w, b: torch.func.functional_call(norm, {"weight": w, "bias": b}, (x,))
    for scale in (1.0, 1e-3):  # at 1e-3 the variance is below eps
        results = [value_and_gradients(call(norm), x * scale, weight, bias) for norm in norms]
        yield f"LayerNorm, inputs of size {scale:g}", difference(*results), "<=", 2000 / scale * eps
    line = torch.linspace(-8, 8, 4001).to(device, dtype)
    yield "GELU", difference(*(value_and_gradients(s.gelu, line) for s in (single, orig))), "<=", 1000 * eps
    apart = difference(single.gelu(line), line * 0.5 * (1 + torch.erf(line / math.sqrt(2))))
    yield "GELU from its erf form, at least", apart, ">=", 4e-4
    yield "GELU from its erf form, at most", apart, "<=", 5e-4


@check("same_gradients", None, "Do 00, 01 and 02 give the same logits, loss and gradients?")
def same_gradients(device):
    dtype = double(device)
    x, y = tokens(device)
    reference = build(orig, device, dtype=dtype)
    for script in (single, multi):
        model = build(script, device, dtype=dtype)
        yield f"{script.__name__}: logits", difference(model(x), reference(x)), "<=", 1e4 * torch.finfo(dtype).eps
        yield f"{script.__name__}: loss", difference(model(x, y), reference(x, y)), "<=", loss_limit(device)
        grads = gradients(model, model(x, y)), gradients(reference, reference(x, y))
        yield f"{script.__name__}: gradients, relative", relative(*grads), "<=", loss_limit(device)


@check("same_training", None, "Do ten updates by main() of 00, 01 and 02 print the same losses?", ("cpu", "cuda"))
def same_training(device):
    limit = 1e-5 if device.type == "cpu" else 1e-2  # TF32 on CUDA
    reference = training(orig, device)
    yield "first loss less last, of 00", reference[0][0] - reference[0][-1], ">", 0.5
    for script in (single, multi):
        result = training(script, device)
        yield from compare_trainings(script.__name__, result, reference, limit)
        apart = relative_weights(result[3]["model"], reference[3]["model"])
        yield f"{script.__name__}: weights, relative", apart, "<=", 100 * limit


# -----------------------------------------------------------------------------
# The padded vocabulary


@check("padded_vocabulary", "padded vocabulary", "What do 47 more rows cost, and is the loss still that of 50257?")
def padded_vocabulary(device):
    with torch.device("meta"):
        padded, plain = (script.GPT(GPTConfig(0, 12, 768)) for script in (single, orig))
    yield "rows more", padded.wte.weight.size(0) - plain.wte.weight.size(0), "==", 47
    yield "parameters more", run.count_parameters(padded) - run.count_parameters(plain), "==", 36096
    yield "ln 50304 - ln 50257", math.log(50304) - math.log(50257), ">=", 9e-4
    config = GPTConfig(1, 2, 16)
    model = single.GPT(config).to(device)
    load_canonical(model, {name: torch.zeros(shape) for name, shape in canonical_shapes(config).items()})
    x, y = tokens(device, 1, 4, VOCAB_SIZE)
    yield "loss of equal logits from ln 50257", abs(model(x, y).item() - math.log(50257)), "<=", 1e-5
    yield "logits", model(x).size(-1), "==", VOCAB_SIZE


@check("pad_logits", "padded vocabulary", "Can an id of the padding be sampled, even if its logit is 100?")
def pad_logits(device):
    config = GPTConfig(1, 2, 16, block_size=16)
    model = build(single, device, config).eval()
    with torch.no_grad():  # ln_f gives (1, 0, 0, ...), so that logit i is weight[i, 0]
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(torch.eye(16)[0])
        model.wte.weight[VOCAB_SIZE:, 0] = 100
    idx = torch.zeros(2, 1, dtype=torch.long, device=device)
    uncut = model.lm_head(model.ln_f(torch.zeros(1, 16, device=device)))
    yield "greedy over all rows takes", uncut.argmax().item(), ">=", VOCAB_SIZE
    for temperature in (0, 1.0):
        ids = generate(model, idx, 12, torch.Generator().manual_seed(0), temperature)
        yield f"largest id at temperature {temperature:g}", ids.max().item(), "<", VOCAB_SIZE


@check("pad_rows", "padded vocabulary",
       "Do the rows of the padding get no gradient, stay 0, and stay out of checkpoints?")
def pad_rows(device):
    model, V = build(single, device), SMALL.vocab_size
    model(*tokens(device)).backward()
    yield "largest gradient of a real row", model.wte.weight.grad[:V].abs().max().item(), ">", 0.01
    yield "largest gradient of a pad row", model.wte.weight.grad[V:].abs().max().item(), "==", 0.0
    model.zero_grad()
    train(model, single, ten_batches(device))
    yield "largest pad weight after 10 updates", model.wte.weight[V:].abs().max().item(), "==", 0.0
    yield "rows in canonical layout", len(weights_of(model)["wte.weight"]), "==", V
    config = GPTConfig(1, 2, 16, block_size=16)
    weights = random_weights(config)
    model = single.GPT(config).to(device)
    try:
        model.load_state_dict(weights | {"lm_head.weight": weights["wte.weight"]})
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    yield "50257 rows put straight in: refused, with both shapes", "50257" in refusal and "50304" in refusal, "==", True
    load_canonical(model, weights)
    back = to_canonical(dict(model.named_parameters()))
    yield "converted and back", relative(back, weights), "==", 0.0


# -----------------------------------------------------------------------------
# Number formats


def round_tf32(x):
    """x (float32) to TF32's 10 fraction bits, to nearest, ties to even."""
    bits = x.view(torch.int32)
    return (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)


def measure_format(device, rounded):
    """(exponent bits, fraction bits) of a format: rounded(x) is the nearest number to x, float32, in it."""
    number = lambda value: rounded(torch.tensor(value, dtype=torch.float32, device=device)).item()
    fraction = max(p for p in range(1, 30) if number(1 + 2.0**-p) != 1)
    largest = max(e for e in range(1, 128) if math.isfinite(number(2.0**e)))
    return math.log2(largest + 1) + 1, fraction


@check("number_formats", None, "What do float32, TF32, bfloat16 and float16 hold?")
def number_formats(device):
    formats = {"float32": (8, 23), "TF32": (8, 10), "float16": (5, 10), "bfloat16": (8, 7)}
    for name, expected in formats.items():
        rounded = round_tf32 if name == "TF32" else lambda x, dtype=getattr(torch, name, None): x.to(dtype).float()
        measured = measure_format(device, rounded)
        yield f"{name}: exponent bits", measured[0], "==", float(expected[0])
        yield f"{name}: fraction bits", measured[1], "==", expected[1]
        if name == "TF32":
            continue
        info, bias = torch.finfo(getattr(torch, name)), 2 ** (expected[0] - 1) - 1
        yield f"{name}: eps", info.eps, "==", 2.0 ** -expected[1]
        yield f"{name}: smallest normal", info.tiny, "==", 2.0 ** (1 - bias)
        yield f"{name}: largest", info.max, "==", (2 - 2.0 ** -expected[1]) * 2.0**bias
    small, near = torch.tensor(1e-8, device=device), torch.tensor(1 + 2.0**-9, device=device)
    yield "1e-8 in float16", small.half().item(), "==", 0.0
    yield "1e-8 in bfloat16", small.bfloat16().item(), ">", 9.9e-9
    yield "1 + 2^-9 in bfloat16", near.bfloat16().item(), "==", 1.0


class TF32(TorchDispatchMode):
    """Every matmul below rounds its float32 operands to TF32, as tensor cores do: an emulation for any device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            args = (*args[:-2], *tree_map_only(torch.Tensor, round_tf32, args[-2:]))
        return function(*args, **(kwargs or {}))


@check("tf32", "TF32", "How far do loss and gradients move when matmuls keep 10 fraction bits?")
def tf32(device):
    model = build(single, device)
    x, y = tokens(device)
    exact_loss = model(x, y)
    exact = gradients(model, exact_loss)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        torch.set_float32_matmul_precision("high")  # put back by Check.run
        loss = model(x, y)
        rounded = gradients(model, loss)
    else:
        with TF32(), sdpa_kernel(SDPBackend.MATH):
            loss = model(x, y)
            rounded = gradients(model, loss)
    yield "loss", difference(loss, exact_loss), "<=", 5e-3
    yield "gradients, relative, at most", relative(rounded, exact), "<=", 2e-2
    yield "gradients, relative, at least", relative(rounded, exact), ">", 1e-5
    yield "dtype of the weights", str(model.wte.weight.dtype), "==", "torch.float32"


@check("bfloat16", "bfloat16",
       "Under autocast, what stays float32, and do losses follow those of float32?", ("cpu", "cuda"))
def bfloat16(device):
    model = build(single, device)
    x, y = tokens(device)
    exact_loss = model(x, y)
    exact = gradients(model, exact_loss)
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)  # as main() does
    loss = model(x, y)
    yield "dtype of logits", str(model(x).dtype), "==", "torch.bfloat16"
    yield "dtype of the loss", str(loss.dtype), "==", "torch.float32"
    yield "loss, relative", difference(loss, exact_loss) / exact_loss.item(), "<=", 2e-2
    yield "gradients, relative", relative(gradients(model, loss), exact), "<=", 0.1
    result = training(single, device, dtype="bfloat16")
    yield from compare_trainings("training", result, training(orig, device), 2e-2)
    checkpoint = result[3]
    kept = [*checkpoint["model"].values(), *checkpoint["optimizer"]["exp_avg"].values(),
            *checkpoint["optimizer"]["exp_avg_sq"].values()]
    yield "dtypes of weights and AdamW's state", " ".join({str(t.dtype) for t in kept}), "==", "torch.float32"


@check("lost_updates", "bfloat16", "Why float32 weights: what is left of 100 updates of a thousandth each?")
def lost_updates(device):
    for dtype, relation, limit in (torch.float32, ">", 0.09), (torch.bfloat16, "==", 0.0):
        weight = nn.Parameter(torch.ones(8, dtype=dtype, device=device))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        yield f"weights in {dtype} moved by", (weight.float().mean() - 1).item(), relation, limit


@check("loss_scaling", "bfloat16",
       "In float16, are small gradients kept, then unscaled and clipped, overflows skipped?", ("cpu", "cuda"))
def loss_scaling(device):
    x = torch.randn(4, 8).to(device)
    for scale, relation, limit in (1.0, "==", 0.0), (2.0**16, ">", 0.99):
        layer, scaler, optimizer = scaled_layer(device, scale)
        with torch.autocast(device.type, torch.float16):
            y = layer(x)
        scaler.scale(y.float().sum() * 1e-9).backward()
        scaler.unscale_(optimizer)
        kept = layer.weight.grad.norm() / (x.half().float().sum(0) * 1e-9).norm()
        yield f"part of a gradient of 1e-9 kept at scale {scale:g}", kept.item(), relation, limit
    for order, expected in (("unscale, clip", 1.0), ("clip, unscale", 1 / 1024)):
        layer, scaler, optimizer = scaled_layer(device, 1024.0)
        scaler.scale(100 * layer(x).sum()).backward()
        unscale, clip = lambda: scaler.unscale_(optimizer), lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        for action in (unscale, clip) if order == "unscale, clip" else (clip, unscale):
            action()
        yield f"{order}: error of the norm", abs(layer.weight.grad.norm().item() / expected - 1), "<=", 1e-3
    layer, scaler, optimizer = scaled_layer(device, 1024.0)
    before, scales = layer.weight.detach().clone(), []
    for factor in (math.inf, 1.0, 1.0, 1.0):
        scaler.scale(layer(x).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if len(scales) == 1:
            yield "overflow: weights moved by", difference(layer.weight, before), "==", 0.0
    yield "next update: weights moved by", difference(layer.weight, before), ">", 0.0
    yield "scale: 1024, an overflow, three updates", str(scales), "==", "[512.0, 512.0, 512.0, 1024.0]"
    yield from compare_trainings("training", training(single, device, dtype="float16"), training(orig, device), 2e-2)


def scaled_layer(device, scale):
    """(one output's weights, GradScaler that grows after three good updates, optimizer)"""
    layer = nn.Linear(8, 1, bias=False).to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=3)
    return layer, scaler, torch.optim.SGD(layer.parameters(), lr=0.1)


# -----------------------------------------------------------------------------
# Optimizer, batches, compilation, recomputation


@check("fused_adamw", "fused AdamW", "Does the fused optimizer make the updates of the plain one?")
def fused_adamw(device):
    models = [build(single, device) for _ in range(2)]
    optimizers = [torch.optim.AdamW(single.parameter_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=fused)
                  for model, fused in zip(models, (False, True))]
    for step in range(10):
        for p, q in zip(*(model.parameters() for model in models)):
            p.grad = torch.randn_like(p) * 10.0 ** -step
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    yield "weights after 10 updates", relative(*map(weights_of, models)), "<=", 1e-6
    moments = [{n: optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters()}
               for model, optimizer in zip(models, optimizers)]
    yield "second moments", relative(*moments), "<=", 1e-6


@check("adamw_formula", "fused AdamW",
       "Is AdamW the formula of Loshchilov and Hutter (2019), with decay on matrices only?")
def adamw_formula(device):
    dtype = double(device)
    layer = nn.Linear(4, 3).to(device, dtype)
    groups = single.parameter_groups(layer, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    state = {p: [p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)] for p in layer.parameters()}
    for t in range(1, 11):
        for p, (w, m, v) in state.items():
            p.grad = g = torch.randn(p.shape).to(device, dtype)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.95).add_(0.05 * g * g)
            w.mul_(1 - 1e-2 * 0.1 * (p.dim() == 2))
            w.sub_(1e-2 * m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
        optimizer.step()
    apart = max(difference(p, w) for p, (w, _, _) in state.items())
    yield "weights after 10 updates", apart, "<=", 50 * torch.finfo(dtype).eps


@check("schedule", None, "Is the learning rate of 00, 01 and 02 a warm-up from above 0, then a cosine?", ("cpu",))
def schedule(device):
    steps = (0, 9, 10, 55, 100)
    for script in (orig, single, multi):
        config = script.Config(max_steps=100, warmup_steps=10, learning_rate=1.0, min_lr=0.1)
        rates = " ".join(f"{script.get_lr(step, config):.6f}" for step in steps)
        yield f"{script.__name__}: at updates {steps}", rates, "==", "0.100000 1.000000 1.000000 0.550000 0.100000"


@check("pinned_memory", "pinned memory",
       "Does reading ahead into pinned memory give the same batches in order?", ("cpu", "cuda"))
def pinned_memory(device):
    data = TokenDataset([np.arange(2000, dtype=np.uint16), np.arange(700, dtype=np.uint16)], 16)
    batches = [[i, 3 * i % len(data)] for i in range(len(data))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU DataLoader reads ahead, but pins nothing
        ahead = list(load_batches(data, batches, device, pin_memory=True))
    expected = [[torch.stack([data[i][side] for i in batch]) for side in (0, 1)] for batch in batches]
    yield "batches", len(ahead), "==", len(expected)
    yield "largest difference", max(map(difference, map(list, ahead), expected)), "==", 0.0
    yield "y is x one token ahead", max(difference(x[:, 1:], y[:, :-1]) for x, y in ahead), "==", 0.0


@check("compile", "torch.compile", "Does the compiled training step give eager's loss, gradients and ten updates?")
def compiled_training(device):
    if choose_compile("auto", device)[0] == "off":
        raise Skip(f"torch.compile does not work here on {device.type}")
    config = replace(SMALL, n_layer=1)
    eager, raw_model = build(single, device, config), build(single, device, config)
    model = torch.compile(raw_model, dynamic=False)
    x, y = tokens(device)
    loss, expected = model(x, y), eager(x, y)
    yield "loss", difference(loss, expected), "<=", 1e-5
    yield "gradients, relative", relative(gradients(raw_model, loss), gradients(eager, expected)), "<=", 1e-4
    for each in (raw_model, eager):
        each.zero_grad()
    losses = train(raw_model, single, ten_batches(device), call=model), train(eager, single, ten_batches(device))
    yield "10 losses", difference(*losses), "<=", 1e-3
    yield "weights, relative", relative_weights(weights_of(raw_model), weights_of(eager)), "<=", 1e-3


@check("compile_graphs", "torch.compile",
       "Do evaluation and sampling, whose lengths vary, leave the compiled graphs alone?")
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


@check("micro_batch", "larger micro-batch",
       "Is the gradient of 8 sequences that of 4 x 2 accumulated, and of 2 ranks x 2 x 2 averaged?")
def micro_batch(device):
    model, limit = build(single, device, dtype=double(device)), loss_limit(device)
    x, y = tokens(device)
    whole = gradients(model, model(x, y))
    loss = lambda i: model(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
    yield "4 x 2, relative", relative(gradients(model, *(loss(i) / 4 for i in range(4))), whole), "<=", limit
    ranks = [gradients(model, *(loss(i) / 2 for i in part)) for part in ((0, 2), (1, 3))]
    yield "2 ranks x 2 x 2, relative", relative({k: (ranks[0][k] + ranks[1][k]) / 2 for k in whole}, whole), "<=", limit
    undivided = gradients(model, *(loss(i) for i in range(4)))
    yield "not divided by 4: times", (undivided["wpe.weight"].norm() / whole["wpe.weight"].norm()).item(), ">=", 3.99
    if device.type != "mps":
        a, b = training(single, device, batch_size=8), training(single, device, batch_size=2)
        yield from compare_trainings("training, 8 against 4 x 2", a, b, 1e-5 if device.type == "cpu" else 1e-2)


@check("unequal_batches", None, "Four samples in halves: when is the mean of the halves' gradients the gradient?")
def unequal_batches(device):
    model, limit = build(single, device, dtype=double(device)), loss_limit(device)
    x, y = tokens(device, 4)
    whole = gradients(model, model(x, y))
    loss = lambda rows: model(x[rows], y[rows])
    means = {"2 + 2, plain mean": (2, 0.5, "<=", limit), "3 + 1, plain mean": (3, 0.5, ">", 0.05),
             "3 + 1, weighted by count": (3, 0.75, "<=", limit)}
    for name, (n, weight, *expected) in means.items():
        parts = gradients(model, loss(slice(n)) * weight, loss(slice(n, 4)) * (1 - weight))
        yield f"{name}, relative", relative(parts, whole), *expected


@check("recomputation", "recomputation",
       "Are losses and weights unchanged if activations are recomputed, with dropout?", ("cpu", "cuda"))
def recomputation(device):
    def count(part):
        with mock.patch.object(single.MLP, "forward", autospec=True, side_effect=single.MLP.forward) as forward:
            return training(single, device, dropout=0.2, recompute=part), forward.call_count
    off, calls = count("off")
    limit = 1e-6 if device.type == "cpu" else 1e-2  # sums in another order on CUDA
    for part in ("mlp", "block"):
        result, more_calls = count(part)
        yield from compare_trainings(part, result, off, limit)
        yield f"{part}: weights, relative", relative_weights(result[3]["model"], off[3]["model"]), "<=", 10 * limit
        yield f"{part}: MLPs computed again", more_calls - calls, "==", 10 * 2 * SMALL.n_layer


@check("memory_reuse", "memory reuse", "Is memory kept for the next use, and what was left in it never read?", ("cpu",))
def memory_reuse(device):
    model, (x, y) = build(single, device), tokens(device)
    expected = gradients(model, model(x, y))
    keep_freed_memory()
    left = [torch.full((2**k,), math.nan) for k in range(25) for _ in range(4)]  # up to 64 MiB each
    del left
    yield "gradients in used memory, relative", relative(gradients(model, model(x, y)), expected), "<=", 1e-6
    if sys.platform == "linux":
        import resource  # not on Windows

        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            torch.zeros(2**24)
        yield "page faults of 4 x 64 MiB, again", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start, "<=", 64


# -----------------------------------------------------------------------------
# Processes


def on_rank(rank, world_size, folder):
    """What one of the processes of two_ranks does; what it sees goes to folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform != "win32":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    group = lambda name: {"store": dist.FileStore(str(folder / name), world_size), "rank": rank,
                          "world_size": world_size}
    dist.init_process_group("gloo", **group("first"))
    seen = rank_results(rank, world_size)
    dist.destroy_process_group()
    with mock.patch.object(multi, "rendezvous", lambda: group("second")):
        (folder / f"rank{rank}").mkdir()
        seen["training"] = training(multi, torch.device("cpu"), folder / f"rank{rank}", batch_size=2)
    seen["files"] = sorted(p.name for p in (folder / f"rank{rank}").glob("run/*"))
    torch.save(seen, folder / f"rank{rank}.pt")


def rank_results(rank, world_size):
    """Gradients of an update of 2 ranks x 2 micro-batches x 2 sequences, and an evaluation, by the parts of 02."""
    x, y = tokens(torch.device("cpu"))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    raw_model = build(multi, "cpu")
    model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True)
    seen = {"group": f"{dist.get_rank()} {dist.get_world_size()} {total.item():g}", "grads": [], "part": []}
    for micro_step, part in zip(range(2), UpdateSampler(8, 8, 2, seed=5, rank=rank, world_size=world_size)):
        model.require_backward_grad_sync = micro_step == 1  # as main() does
        (model(x[part], y[part]) / 2).backward()
        seen["grads"].append(to_canonical({n: p.grad for n, p in raw_model.named_parameters()}, SMALL.vocab_size))
        seen["part"].append(part)
    seen["eval"] = multi.evaluate(raw_model, [(x[i], y[i]) for i in eval_batches(5, 2, rank, world_size)])
    return seen


@functools.cache
def two_ranks():
    """What each of two processes saw (gloo, loopback); they are started once for all checks."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes = torch.multiprocessing.spawn(on_rank, (2, Path(folder)), nprocs=2, join=False)
        deadline = time.monotonic() + 120
        while not processes.join(timeout=max(0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError("two processes did not finish in 120 s")
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]


@check("process_group", "process group", "Do two processes see each other, and is one alone a group of one?", ("cpu",))
def process_group(device):
    for rank, seen in enumerate(two_ranks()):
        yield f"rank {rank}: rank, world size, sum of 1 and 2", seen["group"], "==", f"{rank} 2 3"
    with one_process():
        yield "alone: rank, world size", f"{dist.get_rank()} {dist.get_world_size()}", "==", "0 1"


@contextlib.contextmanager
def one_process():
    dist.init_process_group("gloo", **rendezvous())
    try:
        yield
    finally:
        dist.destroy_process_group()


@check("rank_parts", "each rank its own part",
       "Is an update the same sequences at any micro-batch and world size, read once?", ("cpu",))
def rank_parts(device):
    reference = UpdateSampler(50, 24, 24, seed=5)
    expected = [sorted(part) for part, _ in zip(reference, range(25))]
    epochs = np.concatenate(expected).tolist()
    yield "25 updates of 24, 50 sequences: fewest and most uses", f"{min(map(epochs.count, range(50)))} " \
        f"{max(map(epochs.count, range(50)))}", "==", "12 12"
    wrong = 0
    for B, world_size in (1, 1), (3, 1), (3, 2), (2, 4), (6, 4):
        parts = [UpdateSampler(50, 24, B, seed=5, rank=rank, world_size=world_size) for rank in range(world_size)]
        streams = [iter(part) for part in parts]
        for update in expected:
            read = [i for stream in streams for _ in range(24 // (B * world_size)) for i in next(stream)]
            wrong += sorted(read) != update
    yield "updates that differ, of 5 x 25", wrong, "==", 0
    ours = [i for rank in range(4) for batch in eval_batches(10, 2, rank, 4) for i in batch]
    yield "evaluation of 10 on 4 ranks: samples", len(ours), "==", 10
    yield "evaluation of 10 on 4 ranks: different ones", len(set(ours)), "==", 10
    padded = [i for rank in range(4) for i in DistributedSampler(range(10), 4, rank, shuffle=False)]
    yield "DistributedSampler counts", len(padded), "==", 12
    masks = []
    for rank in (0, 1):
        torch.manual_seed(mix_seeds(1337, 0, rank))
        masks.append(F.dropout(torch.ones(64)))
    yield "dropout masks of two ranks differ by", difference(*masks), ">", 0.0


@check("ddp_gradients", "DDP", "Do two processes with accumulation give one gradient, exchanged once?", ("cpu",))
def ddp_gradients(device):
    ranks, model = two_ranks(), build(orig, device)
    x, y = tokens(device)
    yield "sequences read", str(sorted(sum((p for seen in ranks for p in seen["part"]), []))), "==", str(list(range(8)))
    for rank, seen in enumerate(ranks):
        part = seen["part"][0]
        own = gradients(model, model(x[part], y[part]) / 2)
        yield f"rank {rank}, first micro-step: from its own gradient", relative(seen["grads"][0], own), "<=", 1e-5
    yield "last micro-step: rank 0 from rank 1", relative(ranks[0]["grads"][1], ranks[1]["grads"][1]), "==", 0.0
    whole = gradients(model, model(x, y))
    yield "last micro-step: from 00's gradient of all 8", relative(ranks[0]["grads"][1], whole), "<=", 1e-5
    yield from compare_trainings("main() on 2 ranks", ranks[0]["training"], training(orig, device), 1e-5)


@check("reduced_metrics", "reduced metrics",
       "Is the loss that two unequal ranks report the mean over all tokens?", ("cpu",))
def reduced_metrics(device):
    x, y = (t[:5] for t in tokens(device))
    with torch.no_grad():
        nats = -build(orig, device)(x).double().log_softmax(-1).gather(2, y[..., None])[..., 0]  # (5, T)
    shares = [[i for batch in eval_batches(5, 2, rank, 2) for i in batch] for rank in range(2)]
    for rank, seen in enumerate(two_ranks()):
        yield f"rank {rank}: from the mean over all", abs(seen["eval"]["val_loss"] - nats.mean().item()), "<=", 1e-5
        yield f"rank {rank}: tokens", seen["eval"]["val_tokens"], "==", nats.numel()
    mean_of_means = sum(nats[share].mean().item() for share in shares) / 2
    yield "mean of the ranks' means: off by", abs(mean_of_means - nats.mean().item()), ">", 1e-2


@check("one_writer", "one writer", "Does rank 0 write the run folder, and rank 1 nothing?", ("cpu",))
def one_writer(device):
    first, second = two_ranks()
    expected = {"run.json", "metrics.jsonl", "summary.json", "step_000010.pt"}
    yield f"rank 0: missing of {len(expected)} files", len(expected - set(first["files"])), "==", 0
    yield "rank 1: files", len(second["files"]), "==", 0


@check("checkpoint_keys", None, "Is a checkpoint the same if the model was compiled, in DDP, or both?", ("cpu",))
def checkpoint_keys(device):
    compile = functools.partial(torch.compile, backend="eager")
    wrappings = {"plain": lambda m: m, "compiled": compile, "DDP": DistributedDataParallel,
                 "compiled DDP": lambda m: compile(DistributedDataParallel(m)),
                 "DDP of compiled": lambda m: DistributedDataParallel(compile(m))}
    x, y = tokens(device)
    with one_process():
        for name, wrap in wrappings.items():
            raw_model = build(multi, device)
            model = wrap(raw_model)
            model(x, y).backward()
            saved = weights_of(raw_model)
            check_shapes(saved, SMALL, name)  # raises unless the keys are exactly those of the canonical layout
            fresh = orig.GPT(SMALL)
            load_canonical(fresh, saved)
            yield f"{name}: logits from those of 00 with its checkpoint", difference(model(x), fresh(x)), "<=", 1e-4
            prefixed = any("module." in key or "_orig_mod." in key for key in model.state_dict())
            yield f"{name}: the wrapper's own keys have a prefix", prefixed, "==", name != "plain"
            del model  # before its process group


# -----------------------------------------------------------------------------
# Randomness and rounding


@check("seeds", None, "Does a seed give the same numbers, and does one more draw change all that follow?")
def seeds(device):
    def draw(*sizes):
        torch.manual_seed(123)
        return torch.cat([torch.randn(size, device=device) for size in sizes])
    yield "six numbers, same seed", difference(draw(6), draw(6)), "==", 0.0
    yield "six numbers, one draw before: of them unchanged", (draw(6) == draw(1, 6)[1:]).sum().item(), "==", 0
    weights = torch.arange(1.0, 11.0, device=device)
    torch.manual_seed(123)
    at_once = torch.multinomial(weights, 20, replacement=True)
    torch.manual_seed(123)
    singly = torch.cat([torch.multinomial(weights, 1) for _ in range(20)])
    yield "20 ids at once or singly: of them equal", (at_once == singly).sum().item(), "<", 20


@check("own_generators", None, "Do evaluation and sampling leave the random stream of training alone?")
def own_generators(device):
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.mps.get_rng_state if device.type == "mps" \
        else torch.get_rng_state
    for script in (orig, single):
        model = build(script, device, replace(SMALL, dropout=0.1))
        before, cpu_before = state(), torch.get_rng_state()
        sample = lambda seed: generate(model, tokens(device, 2, 3)[0], 8, torch.Generator().manual_seed(seed), top_k=50)
        first = sample(1)
        script.evaluate(model, [tokens(device)])
        still = state().equal(before) and torch.get_rng_state().equal(cpu_before)
        yield f"{script.__name__}: stream unmoved", still, "==", True
        yield f"{script.__name__}: same seed, same ids", first.equal(sample(1)), "==", True
        yield f"{script.__name__}: another seed, same ids", first.equal(sample(2)), "==", False
        yield f"{script.__name__}: in training mode afterwards", model.training, "==", True


@check("addition_order", None, "Is floating-point addition associative?")
def addition_order(device):
    a, b, c = (torch.tensor(value, device=device) for value in (1e8, -1e8, 1.0))
    yield "(1e8 - 1e8) + 1", ((a + b) + c).item(), "==", 1.0
    yield "1e8 + (-1e8 + 1)", (a + (b + c)).item(), "==", 0.0
    numbers = torch.rand(1000).to(device)
    orders = numbers, numbers.sort().values, numbers.sort(descending=True).values
    sums = [functools.reduce(torch.add, order).item() for order in orders]
    yield "1000 numbers, three orders: different sums", len(set(sums)), ">=", 2
    yield "from the exact sum, relative", max(abs(s / math.fsum(numbers.tolist()) - 1) for s in sums), "<=", 1e-5


@check("first_loss", None, "Is the first loss on random tokens that of equal chances, ln 50257?")
def first_loss(device):
    config, (x, y) = PRESETS["tiny"], tokens(device, 2, 64, VOCAB_SIZE)
    weights = init_weights(config, 1337)
    for script in (orig, single):
        model = script.GPT(config).to(device)
        load_canonical(model, weights)
        with torch.no_grad():
            loss = model(x, y).item()
        yield f"{script.__name__}: from {math.log(VOCAB_SIZE):.3f}", abs(loss - math.log(VOCAB_SIZE)), "<=", 0.3


# -----------------------------------------------------------------------------
# Accounting


def count_flops(script, config, T):
    """(forward, forward and backward) FLOPs per token as PyTorch counts them, without computing anything."""
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        x = torch.zeros(1, T, dtype=torch.long)
        loss = script.GPT(config)(x, x)
        forward = counter.get_total_flops()
        loss.backward()
        return forward / T, counter.get_total_flops() / T


@check("flops", None, "Are 6 x weights + 12 L T C the FLOPs per token that PyTorch counts for GPT-2?", ("cpu",))
def flops(device):
    config, T = PRESETS["gpt2"], 1024
    for script, rows in (orig, VOCAB_SIZE), (single, 50304):
        forward, both = count_flops(script, config, T)
        formula = run.flops_per_token(replace(config, vocab_size=rows), T)
        yield f"{script.__name__}: counted over formula", both / formula, "==", 1.0
        yield f"{script.__name__}: forward and backward over forward", both / forward, "==", 3.0
    matmuls = sum(math.prod(s) for n, s in canonical_shapes(config).items() if len(s) == 2 and n != "wpe.weight")
    attention_flops = run.flops_per_token(config, T) - 6 * matmuls
    yield "attention: 12 L T C", attention_flops, "==", 12 * 12 * T * 768
    yield "attention's share at T = 1024", attention_flops / run.flops_per_token(config, T), "<", 0.15


@check("parameters_and_bytes", None, "How many parameters are there, and how many bytes do they need in training?")
def parameters_and_bytes(device):
    with torch.device("meta"):
        model = orig.GPT(PRESETS["gpt2"])
    yield "GPT-2 124M, tied weights once", run.count_parameters(model), "==", 124439808
    yield "one tensor is embedding and head", model.wte.weight is model.lm_head.weight, "==", True
    model = build(single, device)
    optimizer = torch.optim.AdamW(single.parameter_groups(model, 0.1), fused=True)
    model(*tokens(device)).backward()
    optimizer.step()
    n = run.count_parameters(model)
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors) / n
    yield "bytes of weights, each", size(model.parameters()), "==", 4.0
    yield "bytes of gradients, each", size(p.grad for p in model.parameters()), "==", 4.0
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    yield "bytes of AdamW's state, each", size(moments), "==", 8.0


# -----------------------------------------------------------------------------
# Command


def check_writable(path):
    """Raise UserError unless a file can be written at path; nothing is left behind."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give a file in a folder that exists") from error


def write_results(path, results):
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written ({error.strerror})") from error


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="results.json", help="JSON file to write (default: results.json)")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu", help="where to check (default: cpu)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone: " + ", ".join(CHECKS))
    args = parser.parse_args(argv)
    path, device = Path(args.results), get_device(args.device)
    names = args.only or list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        raise UserError(f"--only {' '.join(unknown)}: no such check; there are {', '.join(CHECKS)}")
    check_writable(path)
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    results, start = [], time.perf_counter()
    for name in names:
        results.append(CHECKS[name].run(device))
        print_check(results[-1])
    failed = [result["name"] for result in results if result["passed"] is False]
    write_results(path, {"passed": not failed, "environment": environment(device), "checks": results})
    skipped = sum(result["skipped"] for result in results)
    print(f"{len(results) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped in "
          f"{time.perf_counter() - start:.0f} s; written to {path}" + f"; failed: {', '.join(failed)}" * bool(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_cli(main)
