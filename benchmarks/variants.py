"""
The models between 00_orig.py and 01_opt_single_gpu.py, how they are trained, and the processes
that do so. For ladder.py, which compares them.
"""

import contextlib
import difflib
import importlib
import linecache
import multiprocessing
import os
import re
import signal
import sys
import time
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import (  # noqa: E402
    TokenDataset, UpdateSampler, get_device, init_weights, keep_freed_memory, load_batches,
    load_canonical, mix_seeds)
from run import peak_memory  # noqa: E402

single = importlib.import_module("01_opt_single_gpu")

(MERGED_QKV, SDPA, NATIVE_OPS, PADDED_VOCABULARY, TF32, BFLOAT16, FUSED_ADAMW, PINNED_MEMORY,
 COMPILE, MICRO_BATCH, RECOMPUTATION, MEMORY_REUSE) = range(1, 13)
IN_MODEL = {MERGED_QKV, SDPA, NATIVE_OPS, PADDED_VOCABULARY}  # the others are settings of main()
WARM_UP = 2  # updates that are not timed: the first is the cold start
PAUSE = 0.01 if sys.platform == "linux" else 0.25  # till idle OpenMP threads sleep; libomp is slow

# -----------------------------------------------------------------------------
# Variants


@dataclass(frozen=True)
class Variant:
    """Optimisations by number, and (name, value) of 01's Config in place of the chosen ones."""
    numbers: frozenset
    settings: tuple = ()

    def configure(self, config, small_batch_size):
        """Its Config from the full set's; without [10] the micro-batch is small_batch_size."""
        config = replace(config, **dict(self.settings))
        if MICRO_BATCH not in self.numbers:
            config = replace(config, batch_size=small_batch_size)
        return replace(config, dtype=config.dtype if BFLOAT16 in self.numbers else "float32",
                       compile=config.compile if COMPILE in self.numbers else "off",
                       recompute="block" if RECOMPUTATION in self.numbers else config.recompute)


def names():
    """{number: name} of the optimisations of 01, from its docstring."""
    found = re.findall(r"\[(\d+)\] ([^\[\n]+)", single.__doc__)
    return {int(number): name.strip() for number, name in found}


def read_lines(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True)


def model_source(numbers):
    """00_orig.py with those hunks of the diff to 01 whose only tag is in numbers and IN_MODEL."""
    old, new = read_lines("00_orig.py"), read_lines("01_opt_single_gpu.py")
    lines = []
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for kind, i1, i2, j1, j2 in opcodes:
        tags = {int(number) for line in new[j1:j2] for number in re.findall(r"\[(\d+)\]", line)}
        taken = kind != "equal" and len(tags) == 1 and tags <= IN_MODEL & set(numbers)
        lines += new[j1:j2] if taken else old[i1:i2]
    return "".join(lines)


def model_module(numbers):
    """The module that model_source(numbers) is; its GPT is the model."""
    source = model_source(numbers)
    name = "ladder_" + "_".join(map(str, sorted(IN_MODEL & set(numbers))))
    module = types.ModuleType(name)
    sys.modules[name] = module  # where dataclass and torch.compile look
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # for tracebacks
    exec(compile(source, name, "exec"), vars(module))
    return module


class Training:
    """The update of the scripts' main() with the optimisations of variant, on random tokens."""

    def __init__(self, variant, config, model_config):
        self.config, n, device = config, variant.numbers, get_device(config.device)
        if TF32 in n:
            torch.set_float32_matmul_precision("high")
        if MEMORY_REUSE in n:
            keep_freed_memory()
        self.batches = random_batches(config, model_config, device, pin_memory=PINNED_MEMORY in n)
        module = model_module(n)
        self.raw_model = raw_model = module.GPT(model_config).to(device)
        load_canonical(raw_model, init_weights(model_config, config.seed))
        groups = module.parameter_groups(raw_model, config.weight_decay)
        fused = {"fused": True} if FUSED_ADAMW in n else {}
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, **fused)
        self.device, self.get_lr, self.step = device, module.get_lr, 0
        self.model, self.scaler = self.prepare(raw_model, device)

    def prepare(self, raw_model, device):
        """(model, scaler): precision, recomputation and compilation as in 01's main()."""
        config, model = self.config, raw_model
        dtype, mixed = getattr(torch, config.dtype), config.dtype != "float32"
        if mixed:
            raw_model.forward = torch.autocast(device.type, dtype, enabled=mixed)(raw_model.forward)
        scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")
        parts = {"off": [], "mlp": [block.mlp for block in raw_model.h], "block": raw_model.h}
        checkpoint = torch.utils.checkpoint.checkpoint
        for part in parts[config.recompute]:
            part.forward = lambda x, forward=part.forward: checkpoint(
                forward, x, use_reentrant=False)
        if config.compile != "off":
            model = torch.compile(model, mode=config.compile, dynamic=False)
        return model, scaler

    def update(self):
        """One update; what it cost and learnt. dt in seconds, as the scripts take it."""
        config, optimizer, scaler = self.config, self.optimizer, self.scaler
        grad_accum_steps = config.total_batch_size // (config.batch_size * config.block_size)
        t0 = time.perf_counter()
        torch.manual_seed(mix_seeds(config.seed, self.step))
        lr = self.get_lr(self.step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_accum = torch.zeros((), device=self.device)
        for micro_step in range(grad_accum_steps):
            x, y = next(self.batches)
            loss = self.model(x, y) / grad_accum_steps
            loss_accum += loss.detach()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(self.raw_model.parameters(), config.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        train_loss = loss_accum.item()
        dt = time.perf_counter() - t0
        self.step += 1
        return {"loss": train_loss, "grad_norm": grad_norm.item(), "dt": dt,
                "tok_per_sec": config.total_batch_size / dt, **peak_memory(self.device)}


def random_batches(config, model_config, device, pin_memory=False):
    """Micro-batches (x, y) of random tokens, update by update, read as the scripts read theirs."""
    sequences = config.total_batch_size // config.block_size
    size = 16 * config.total_batch_size + 1
    rng = np.random.default_rng(config.seed)
    tokens = rng.integers(0, model_config.vocab_size, size, dtype=np.uint16)
    dataset = TokenDataset([tokens], config.block_size)
    sampler = UpdateSampler(len(dataset), sequences, config.batch_size, config.seed)
    return load_batches(dataset, sampler, device, pin_memory=pin_memory)


# -----------------------------------------------------------------------------
# Processes: one for each variant, two at a time


class Failed(Exception):
    """A variant cannot be measured; the message says why."""

    def __init__(self, variant, reason):
        super().__init__(reason)
        self.variant = variant


def serve(connection, cache, *task):
    """A variant's process: answer each request with an update, or once with why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    try:
        training = Training(*task)
        connection.send({})
        while connection.recv():
            connection.send(training.update())
    except Exception as error:  # whatever it is belongs in the row of this variant
        with contextlib.suppress(OSError):  # the parent may be gone
            connection.send(why(error))


def why(error):
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if out_of_memory or "can't allocate memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def interrupts_ignored():
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


class Worker:
    """The process of one variant, warmed up; updates holds all that it made."""

    def __init__(self, variant, task, cache):
        context = multiprocessing.get_context("spawn")
        self.variant, self.updates = variant, []
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, daemon=True,
                                       args=(theirs, cache, variant, *task))
        with interrupts_ignored():  # inherited: Ctrl-C while it starts is the parent's too
            self.process.start()
        theirs.close()
        self.receive()
        for _ in range(WARM_UP):
            self.update()

    def receive(self):
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            answer = f"its process ended with exit code {self.process.exitcode}"
        if isinstance(answer, str):
            self.close()
            raise Failed(self.variant, answer)
        return answer

    def update(self):
        time.sleep(PAUSE)
        self.connection.send(True)
        self.updates.append(self.receive())
        return self.updates[-1]

    def close(self):
        self.connection.close()
        self.process.kill()
        self.process.join()


class Pool:
    """Workers of the variants of the current pair; one that the next pair needs too goes on."""

    def __init__(self, start):
        self.start, self.workers = start, {}

    def get(self, *variants):
        for variant, worker in list(self.workers.items()):
            if variant not in variants or not worker.process.is_alive():
                self.workers.pop(variant).close()
        for variant in variants:
            if variant not in self.workers:
                self.workers[variant] = self.start(variant)
        return [self.workers[variant] for variant in variants]

    def close(self):
        for worker in self.workers.values():
            worker.close()
        self.workers = {}
