"""
A training run and its folder: flags and what "auto" becomes, accounting, log, checkpoints, summary.
What the three training scripts share beside data and model helpers, and no lesson is about.
Importing it has no effect.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import re
import signal
import statistics
import sys
import time
import typing
from dataclasses import asdict, fields, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.utils.data import Subset
from tqdm import tqdm

import hellaswag
from common import (PRESETS, ArgumentParser, GPTConfig, UserError, canonical_shapes, check_shapes,
                    choose_compile, choose_dtype, decode, environment, find_checkpoints,
                    from_canonical, generate, get_tokenizer, init_weights, keep_freed_memory,
                    load_canonical, load_data, load_weights, mix_seeds, newest_checkpoint,
                    peak_flops, print0, replacing, save_checkpoint, to_canonical, write_json)

# -----------------------------------------------------------------------------
# Configuration: recipes, flags, and what "auto" becomes


# shards: GPT-3's batch and schedule for 124M, 10B tokens (build-nanogpt); the others make a short
# run that visibly learns
RECIPES = {
    "shards": dict(total_batch_size=524288, max_steps=19073, learning_rate=6e-4,
                   val_tokens=10485760),
    "text": dict(total_batch_size=16384, max_steps=100, learning_rate=6e-4, val_tokens=10485760),
    "tiny": dict(total_batch_size=2048, max_steps=100, learning_rate=1e-3, val_tokens=10485760),
}


def choose_recipe(config, data):
    """The one of RECIPES that a preset and Data go by."""
    return RECIPES["tiny" if config.preset == "tiny" else "text" if data.is_text else "shards"]


# of a run that is resumed: what cannot change, and what is decided anew
FIXED_BY_A_RUN = ("preset", "seed", "total_batch_size", "block_size")
CHOSEN_BY_THE_MACHINE = ("device", "batch_size", "dtype", "compile", "recompute")


def parse_config(Config, doc, argv=None):
    """A Config from the command line: each field is a flag, the comment beside it the help.

    Its attribute given holds the names of the flags that were given.
    """
    parser = ArgumentParser(doc)
    parser.argument_default = argparse.SUPPRESS
    pattern = re.compile(r"(?:^    # (.*)\n)?^    (\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)
    found = pattern.findall(inspect.getsource(Config))
    comments = {name: beside or above for above, name, beside in found}
    hints = typing.get_type_hints(Config)
    for f in fields(Config):
        names = list(dict.fromkeys([f"--{f.name.replace('_', '-')}", f"--{f.name}"]))
        help = comments[f.name] + ("" if f.default in (None, False) else f" (default: {f.default})")
        options = [a for a in typing.get_args(hints[f.name]) if a is not type(None)]
        if hints[f.name] is bool:
            parser.add_argument(*names, action="store_true", default=argparse.SUPPRESS, help=help)
        elif options and isinstance(options[0], str):
            parser.add_argument(*names, choices=options, help=help)
        else:
            type_ = options[0] if options else hints[f.name]
            parser.add_argument(*names, type=type_, metavar="X", help=help)
    asked = vars(parser.parse_args(argv))
    config = Config(**asked)
    config.given = set(asked)
    return config


def explicit(config):
    """What the user asked for: the flags given, or where Python made config what is no default."""
    changed = {f.name for f in fields(config) if getattr(config, f.name) != f.default}
    return {name: getattr(config, name) for name in getattr(config, "given", changed)}


def merge_resumed(config, checkpoint, path):
    """config with the settings of checkpoint's run, but for what the user asks for now."""
    if missing := {"optimizer", "scaler", "config", "requested", "data"} - checkpoint.keys():
        raise UserError(f"--resume: {path} holds weights, but not the {', '.join(sorted(missing))} "
                        "of a run; start a new run from them with --init")
    asked, saved, names = explicit(config), checkpoint["config"], {f.name for f in fields(config)}
    if asked.get("preset") == "auto":  # whatever the run has
        del asked["preset"]
    for name in FIXED_BY_A_RUN:
        if asked.get(name, saved[name]) != saved[name]:
            raise UserError(f"--{name.replace('_', '-')} {asked[name]}: the run in {path.parent} "
                            f"has {saved[name]}, which a resumed run keeps; leave the flag out, "
                            "or start a new run from its weights with --init")
    requested = {k: v for k, v in checkpoint["requested"].items()
                 if k in CHOSEN_BY_THE_MACHINE and k != "device"}
    kept = {k: v for k, v in saved.items() if k not in CHOSEN_BY_THE_MACHINE}
    return replace(config, **{k: v for k, v in (kept | requested | asked).items() if k in names})


def same_way(config, saved, device):
    """Whether the run that saved its settings trained as this one will: with or without [10]."""
    return saved["device"] == device.type and ("dtype" in saved) == hasattr(config, "dtype")


def resolve(config, model_config, data, device, max_batch_size, world_size=1):
    """config with every None and "auto" replaced; UserError where its numbers do not fit."""
    check_ranges(config)
    recipe = choose_recipe(config, data)
    positions = model_config.block_size
    T = positions if config.block_size is None else config.block_size
    if T > positions:
        raise UserError(f"--block-size {T}: the model has positions for {positions}; lower it")
    chosen = {name: value for name, value in recipe.items() if getattr(config, name) is None}
    if "total_batch_size" in chosen:
        chosen["total_batch_size"] = max(1, chosen["total_batch_size"] // T) * T
    config = replace(config, device=device.type, block_size=T, **chosen)
    tenth = max(1, config.max_steps // 10)
    derived = {"min_lr": config.learning_rate / 10, "warmup_steps": min(715, tenth),
               "eval_every": min(250, 2 * tenth), "sample_every": min(1000, 5 * tenth),
               "save_every": min(500, 5 * tenth)}
    config = replace(config, **{name: value for name, value in derived.items()
                                if getattr(config, name) is None})
    if config.min_lr > config.learning_rate:
        raise UserError(f"--min-lr {config.min_lr} is above --learning-rate {config.learning_rate}")
    B = resolve_batch_size(config, model_config, device, max_batch_size, world_size)
    return replace(config, batch_size=B)


# the smallest and the largest value of each number; the largest are beyond all use, but torch and
# NumPy can take them
RANGES = {
    **dict.fromkeys(("max_steps", "total_batch_size", "batch_size", "block_size", "keep"),
                    (1, 2**31 - 1)),
    **dict.fromkeys(("warmup_steps", "eval_every", "sample_every", "hellaswag_every", "save_every"),
                    (0, 2**31 - 1)),
    "val_tokens": (1, 2**63 - 1), "seed": (0, 2**63 - 1), "learning_rate": (1e-12, 1e3),
    "min_lr": (0, 1e3), "weight_decay": (0, 1e3), "grad_clip": (0, 1e30), "dropout": (0, 0.99),
}


def check_ranges(config):
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:  # nan is not either
            raise UserError(f"--{name.replace('_', '-')} {value}: must be from {low} to {high}")


def resolve_batch_size(config, model_config, device, max_batch_size, world_size):
    """Sequences per forward pass: as asked, else the most up to max_batch_size that divide the
    update and fit in memory."""
    total, B, T = config.total_batch_size, config.batch_size or 1, config.block_size
    unit = B * T * world_size
    if total % unit:
        nearest = [str(n) for n in (total // unit * unit, (total // unit + 1) * unit) if n > 0]
        raise UserError(f"--total-batch-size {total} is not a multiple of batch size {B} x block "
                        f"size {T} x {world_size} processes = {unit}; "
                        f"the nearest that are: {' and '.join(nearest)}")
    if config.batch_size:
        return config.batch_size
    sequences = total // unit
    divisors = [n for n in range(1, min(sequences, max_batch_size) + 1) if sequences % n == 0]
    n_params = sum(math.prod(shape) for shape in canonical_shapes(model_config).values())
    memory = 0.8 * (free_memory(device) - 16 * n_params)
    return max((n for n in divisors if sum(activation_bytes(config, model_config, n)) < memory),
               default=1)


def free_memory(device):
    """Bytes that a run can use on device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


# -----------------------------------------------------------------------------
# Accounting: parameters, bytes, FLOPs


def count_parameters(model):
    """Number of parameters; shared ones once."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(model_config, T):
    """Forward and backward FLOPs per token: 6 per matmul weight (the head counted once, embeddings
    are look-ups) and 12 n_layer T C for the two attention matmuls (PaLM, appendix B; causal
    attention counted in full)."""
    L, C = model_config.n_layer, model_config.n_embd
    return 6 * (12 * L * C**2 + model_config.vocab_size * C) + 12 * L * T * C


def compute_dtype(config):
    """What matmuls compute in, in a script that has a choice or not."""
    return getattr(torch, getattr(config, "dtype", "float32"))


def activation_bytes(config, model_config, B):
    """Estimated bytes that a micro-batch of B sequences keeps for the backward pass:
    (of the blocks, of the logits).

    Counted in values per token and block: 14 C from the matmuls and norms in the compute dtype and
    2 C of the float32 residual stream; 8 C of them are the MLP's. The hand-written script also
    keeps 17 C from the steps of its norms and GELU. The attention matrix is kept there, and where
    attention is compiled for the CPU.
    """
    c, T = model_config, config.block_size
    by_hand = not hasattr(config, "dtype")
    size = 2 if getattr(config, "dtype", "float32") in ("bfloat16", "float16") else 4
    values = {"off": 14, "mlp": 6, "block": 0}[getattr(config, "recompute", "off")]
    block = (values * size + 2 * 4) * c.n_embd
    if by_hand:
        block += 17 * 4 * c.n_embd + 4 * c.n_head * T
    elif config.device == "cpu" and config.compile != "off" and config.recompute != "block":
        block += size * c.n_head * T
    return B * T * c.n_layer * block, B * T * c.vocab_size * (size + 2 * 4)


def human(n, unit=""):
    """1234567 -> '1.2 M' + unit."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor:
            return f"{n / factor:.1f} {letter}{unit}"
    return f"{n:.0f} {unit}".strip()


# -----------------------------------------------------------------------------
# The run folder: settings, log, checkpoints, summary


class Run:
    """One run and its folder: settles the settings, then logs, samples, saves. Only rank 0 writes.

    config, model_config, train_data, val_data and start_step are what a script goes by; signal is
    the last Ctrl-C or SIGTERM received, or 0. Raises UserError before anything is written.
    """

    def __init__(self, config, script, device, max_batch_size, reuse_memory=False,
                 rank=0, world_size=1):
        self.script, self.device = Path(script).stem, device
        self.rank, self.world_size = rank, world_size
        if int(os.environ.get("WORLD_SIZE", 1)) != world_size:
            raise UserError(f"{self.script}.py is one process, but torchrun started "
                            f"{os.environ['WORLD_SIZE']}: use 02_opt_multi_gpu_ddp.py")
        if reuse_memory:
            keep_freed_memory()
        self.out, path, self.checkpoint = find_run(config, self.script, writes=rank == 0)
        self.is_new = not holds_run(self.out)
        if self.checkpoint:
            config = merge_resumed(config, self.checkpoint, path)
        self.requested = config  # a resumed run asks again for what the first one asked for
        config, self.model_config, self.weights = starting_point(config, self.checkpoint, device)
        self.data = load_data(config.data)
        config, self.notes = resolve_dtype(config, device)
        # before the compiler's processes start, and keep the cores busy
        self.peak, self.peak_source = peak_flops(device, compute_dtype(config))
        config, self.notes = resolve_compile(config, device, self.notes)
        if self.checkpoint and same_way(config, self.checkpoint["config"], device):
            # a micro-batch is not made larger than it was, for sums are rounded in its order
            max_batch_size = min(max_batch_size, self.checkpoint["config"]["batch_size"])
        self.config = resolve(config, self.model_config, self.data, device, max_batch_size,
                              world_size)
        self.train_data = self.data.dataset("train", self.config.block_size)
        val_data = self.data.dataset("val", self.config.block_size)
        sequences = max(1, min(len(val_data), self.config.val_tokens // self.config.block_size))
        self.val_data = Subset(val_data, range(sequences))  # the same at every batch and world size
        self.start_step = self.check_resumed(path) if self.checkpoint else 0
        if self.config.sample_every > 0:  # what is missing or malformed ends the run now
            get_tokenizer()
        if self.config.hellaswag_every > 0:
            hellaswag.load_examples()
        self.dts, self.tokens, self.overflows, self.last_loss, self.last_eval = [], 0, 0, None, {}
        self.signal = 0
        self.flops_per_token = flops_per_token(self.model_config, self.config.block_size)
        self.open_folder()
        self.print_settings(path)
        self.start()

    def check_resumed(self, path):
        step, max_steps = self.checkpoint["step"], self.config.max_steps
        if self.checkpoint["data"] != self.data.fingerprint:
            raise UserError(f"--data {self.config.data}: these are not the tokens that the run in "
                            f"{self.out} was trained on; give the same data, or start a new run "
                            "from its weights with --init")
        if step > max_steps:
            raise UserError(f"--max-steps {max_steps}: {path} is already at {step}")
        return step

    def open_folder(self):
        """Make the folder and keep other processes out of it."""
        if self.rank != 0:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.out / ".lock")
            self.lock.acquire(timeout=0)
            if self.is_new and holds_run(self.out):
                raise UserError(f"--out {self.out}: another process has trained in this folder "
                                "meanwhile; choose another")
            for leftover in self.out.glob("*.tmp"):
                leftover.unlink()
            keep_metrics_before(self.out / "metrics.jsonl", self.start_step)
            self.metrics = open(self.out / "metrics.jsonl", "a", encoding="utf-8")
            write_json(self.out / "run.json", self.describe())
        except Timeout as error:
            raise UserError(f"--out {self.out}: another process is training in this folder; "
                            "choose another") from error
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be written ({error.strerror}); "
                            "choose another folder") from error

    def describe(self):
        return {"script": self.script, "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
                "config": asdict(self.config), "model": asdict(self.model_config),
                "data": self.data.source, "world_size": self.world_size,
                "environment": environment(self.device)}

    def print_settings(self, path):
        """Every choice that was made, a line each."""
        c, T = self.config, self.config.block_size
        hardware = environment(self.device)["device" if self.device.type == "cuda" else "cpu"]
        processes = f"{self.world_size} process{'es' * (self.world_size > 1)}"
        accumulation = c.total_batch_size // (c.batch_size * T * self.world_size)
        epochs = c.max_steps * c.total_batch_size / T / len(self.train_data)
        start = f"continued from {path}, at update {self.start_step}" if self.checkpoint else c.init
        lines = {
            "device": f"{self.device} ({hardware}), {torch.get_num_threads()} threads, {processes}",
            "data": f"{self.data.source}: {len(self.train_data) * T:,} tokens train, "
                    f"{len(self.val_data) * T:,} validate",
            "weights": start,
            **self.describe_model(), **self.notes,
            "update": f"{c.total_batch_size:,} tokens = {processes} x {accumulation} micro-batches "
                      f"x {c.batch_size} sequences x {T} tokens",
            "schedule": f"{c.max_steps:,} updates ({epochs:.1f} epochs), "
                        f"learning rate {c.learning_rate:g} to {c.min_lr:g}, {c.warmup_steps} of "
                        f"warm-up, weight decay {c.weight_decay:g}, clipping at {c.grad_clip:g}",
            "folder": self.out,
        }
        for name, text in lines.items():
            print0(f"{name:<9} {text}")
        recipe = choose_recipe(c, self.data)
        usual, unchanged = recipe["total_batch_size"], c.learning_rate == recipe["learning_rate"]
        if unchanged and not 1 / 4 <= c.total_batch_size / usual <= 4:
            print0(f"note: an update is usually {usual:,} tokens here, for which the learning rate "
                   f"was chosen; with {c.total_batch_size:,} another --learning-rate may be needed")

    def describe_model(self):
        """Lines about size, memory and compute."""
        c, m = self.config, self.model_config
        n_params = sum(math.prod(shape) for shape in canonical_shapes(m).values())
        blocks, logits = activation_bytes(c, m, c.batch_size)
        mixed = compute_dtype(c) != torch.float32
        copies = f" and {human(2 * n_params)}B of 16-bit copies" * mixed
        return {
            "model": f"{c.preset}: {m.n_layer} layers, {m.n_head} heads, {m.n_embd} channels, "
                     f"{human(n_params)} parameters",
            "memory": f"weights {human(4 * n_params)}B{copies}, gradients {human(4 * n_params)}B, "
                      f"AdamW {human(8 * n_params)}B; "
                      f"estimated: activations {human(blocks)}B, logits {human(logits)}B",
            "compute": f"{human(self.flops_per_token)}FLOP per token; "
                       f"peak {human(self.peak)}FLOP/s ({self.peak_source})",
        }

    def start(self):
        """Progress bar, profiler, signals."""
        self.bar = tqdm(total=self.config.max_steps, initial=self.start_step, unit="update",
                        dynamic_ncols=True, disable=self.rank != 0 or not sys.stderr.isatty())
        self.profiler = None
        if self.config.profile and self.rank == 0:
            schedule = torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1)
            self.profiler = torch.profiler.profile(schedule=schedule,
                                                   on_trace_ready=self.save_trace)
            self.profiler.start()
        self.handlers = {}
        for signum in (signal.SIGINT, signal.SIGTERM):
            try:
                self.handlers[signum] = signal.signal(signum, self.on_signal)
            except ValueError:  # not the main thread: whoever called main() handles signals
                pass

    def on_signal(self, signum, frame):
        if self.signal == signum == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        self.signal = signum
        print0(f"{signal.Signals(signum).name}: finishing what is under way, then saving")

    def save_trace(self, profiler):
        profiler.export_chrome_trace(str(self.out / "trace.json"))
        print0(f"profile of 3 updates in {self.out / 'trace.json'}: "
               "open it in https://ui.perfetto.dev")

    def attach(self, model, optimizer, scaler=None):
        """Load the starting weights and, on resume, the optimizer's and scaler's state; save()
        saves these three."""
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        load_canonical(model, self.weights)
        if self.checkpoint:
            load_optimizer(optimizer, model, self.checkpoint["optimizer"])
            if scaler is not None and scaler.is_enabled():
                if self.checkpoint["scaler"]:
                    scaler.load_state_dict(self.checkpoint["scaler"])
                else:
                    print0("note: the run so far had no loss scaling; it starts at its default")
        self.weights = self.checkpoint = None

    def due(self, every, step):
        """Whether what is done every so many updates, and at the end, is due; 0 turns it off."""
        return every > 0 and step > 0 and (step % every == 0 or step == self.config.max_steps)

    def log_update(self, step, loss, lr, grad_norm, dt):
        """Record an update of dt seconds; loss in nats per token. UserError if not finite."""
        self.check_finite(step, loss, grad_norm)
        self.check_learning(step, loss)
        self.dts.append(dt)
        self.tokens += self.config.total_batch_size
        self.last_loss = loss
        tok_per_sec = self.config.total_batch_size / dt
        mfu = self.mfu(tok_per_sec)
        finite_norm = grad_norm if math.isfinite(grad_norm) else None
        self.write_metrics(step=step, loss=loss, lr=lr, grad_norm=finite_norm, dt=dt,
                           tok_per_sec=tok_per_sec, mfu=mfu)
        updates_left = self.config.max_steps - step - 1
        eta = tqdm.format_interval(updates_left * statistics.median(self.dts[1:][-50:] or self.dts))
        note = " (cold start)" if len(self.dts) == 1 else ""
        print0(f"step {step:5d}/{self.config.max_steps} | loss {loss:.6f} | lr {lr:.2e} | "
               f"norm {grad_norm:.4f} | dt {dt * 1000:.0f} ms | tok/s {tok_per_sec:,.0f} | "
               f"mfu {mfu:.1%} | eta {eta}{note}")
        self.bar.update()
        if self.profiler:
            self.profiler.step()

    def mfu(self, tok_per_sec):
        return self.flops_per_token * tok_per_sec / (self.peak * self.world_size)

    def check_finite(self, step, loss, grad_norm):
        """The scaler skips a float16 step that overflows; 20 in a row, or anything else that is not
        finite, end the run."""
        scales = self.scaler is not None and self.scaler.is_enabled()
        self.overflows = self.overflows + 1 if scales and not math.isfinite(grad_norm) else 0
        if math.isfinite(loss) and (math.isfinite(grad_norm) or 0 < self.overflows < 20):
            return
        overflows = f", {self.overflows} overflows in a row" * (self.overflows > 0)
        raise self.not_finite(f"update {step}: loss {loss}, gradient norm {grad_norm}{overflows}")

    def check_learning(self, step, loss):
        """Warn, once, where after the warm-up the model is worse than one that guesses."""
        guessing = math.log(self.model_config.vocab_size)
        if step == max(self.config.warmup_steps, 20) and loss > guessing:
            print0(f"warning: after {step} updates the loss is {loss:.2f}, guessing would give "
                   f"{guessing:.2f}: is the data text, and --learning-rate not too high?")

    def not_finite(self, what):
        saved = find_checkpoints(self.out)
        return UserError(f"{what}; last good checkpoint: {saved[-1] if saved else 'none'}. "
                         "Usual causes: --learning-rate too high or --warmup-steps too few, "
                         "--grad-clip 0, float16 (try --dtype float32)")

    def log_eval(self, step, metrics):
        """Record an evaluation of the weights before update step. UserError if not finite."""
        if not all(map(math.isfinite, metrics.values())):
            raise self.not_finite(f"before update {step}: {metrics}")
        self.last_eval |= metrics
        self.write_metrics(step=step, **metrics)
        parts = [f"{k} {v:.6f}" if isinstance(v, float) else f"{k} {v:,}"
                 for k, v in metrics.items()]
        print0(f"step {step:5d}/{self.config.max_steps} | {' | '.join(parts)}")

    def sample(self, step, num_samples=2, prompt_tokens=16, max_new_tokens=48):
        """Print how the model continues validation sequences, with a generator of its own."""
        if self.rank != 0:
            return
        generator = torch.Generator().manual_seed(mix_seeds(self.config.seed, step))
        n = min(num_samples, len(self.val_data))
        idx = torch.stack([self.val_data[i][0][:prompt_tokens] for i in range(n)]).to(self.device)
        for row in generate(self.model, idx, max_new_tokens, generator, top_k=50):
            prompt, text = decode(row[: idx.size(1)]), decode(row[idx.size(1) :])
            print0(f"step {step:5d}/{self.config.max_steps} | sample: {prompt!r} -> {text!r}")

    def save(self, step):
        """Checkpoint after step updates, in canonical layout; the last config.keep stay."""
        if self.rank != 0 or self.config.save_every == 0:
            return
        weights = to_canonical(dict(self.model.named_parameters()), self.model_config.vocab_size)
        path = self.out / f"step_{step:06d}.pt"
        save_checkpoint(path, {
            "step": step,
            "model": weights | {"lm_head.weight": weights["wte.weight"]},
            "model_config": asdict(self.model_config),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "config": asdict(self.config),
            "requested": asdict(self.requested),
            "data": self.data.fingerprint,
        })
        print0(f"step {step:5d}/{self.config.max_steps} | saved {path}")
        for old in find_checkpoints(self.out)[: -self.config.keep]:
            old.unlink()

    def finish(self, stop):
        """Summary and plot; ends the process with 128 + stop where that signal ended the run
        before its last update."""
        self.bar.close()
        if self.profiler:
            self.profiler.stop()
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        if self.rank == 0:
            write_json(self.out / "summary.json", self.summary(stop))
            self.metrics.close()
            plot_metrics(self.out)
            self.lock.release()
            print0(f"summary.json, metrics.jsonl and loss.png are in {self.out}")
        if stop:
            sys.exit(128 + int(stop))

    def summary(self, stop):
        steady = [self.config.total_batch_size / dt for dt in self.dts[1:]]
        tok_per_sec = statistics.median(steady) if steady else None
        wall = time.time() - psutil.Process().create_time()
        return self.describe() | {
            "parameters": count_parameters(self.model),
            "tokens": self.tokens,
            "cold_start_s": self.dts[0] if self.dts else None,
            "train_tok_per_sec": tok_per_sec,
            "end_to_end_tok_per_sec": self.tokens / wall,
            "mfu": self.mfu(tok_per_sec) if steady else None,
            "peak_flops": self.peak, "peak_flops_source": self.peak_source,
            **peak_memory(self.device),
            "loss": self.last_loss, **self.last_eval,
            "interrupted_by": signal.Signals(int(stop)).name if stop else None,
        }

    def write_metrics(self, **metrics):
        if self.rank != 0:
            return
        try:
            self.metrics.write(json.dumps(metrics) + "\n")
            self.metrics.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # or Python complains about what is not written
                self.metrics.close()
            path = self.out / "metrics.jsonl"
            raise UserError(f"{path} cannot be written ({error.strerror})") from error


def holds_run(out):
    """Whether anything was learnt in folder out; not where a run ended before its first update."""
    metrics = out / "metrics.jsonl"
    updates = metrics.exists() and b'"loss"' in metrics.read_bytes()
    return updates or any(out.glob("step_*.pt"))


def find_run(config, script, writes):
    """(folder, path of its newest checkpoint, checkpoint); the latter two None for a new run.

    That a new run's folder is free only the process that writes asks: it may be ahead of the rest.
    A worker group that torchrun restarted continues the run it had, from its last checkpoint if
    there is one.
    """
    restarted = is_restarted()
    out = choose_folder(config, script, restarted)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file, not a folder")
    if not (config.resume or restarted):
        if writes and holds_run(out):
            raise UserError(f"--out {out}: holds a run already; continue it with --resume, "
                            "or choose another folder")
        return out, None, None
    path, checkpoint = newest_checkpoint(out)
    if checkpoint is None and not restarted:
        raise UserError(f"--resume: no whole checkpoint in {out}; name another folder with --out, "
                        "or start anew")
    return out, path, checkpoint


def choose_folder(config, script, restarted):
    """--out; else, to resume, the newest run that learnt something (restarted by torchrun: that of
    this launch); else a new folder."""
    if config.out:
        return Path(config.out)
    runs = sorted(Path("log", script).glob("*/run.json"), key=os.path.getmtime)
    if restarted:  # the name of a launch may be that of others too
        launch, launched = os.environ.get("TORCHELASTIC_RUN_ID"), launch_time()
        runs = [run for run in runs if run.stat().st_mtime > launched
                and json.loads(run.read_text(encoding="utf-8"))["launch"] == launch]
    elif config.resume:
        runs = [run for run in runs if holds_run(run.parent)]
    if runs and (config.resume or restarted):
        return runs[-1].parent
    if config.resume and not restarted:
        raise UserError(f"--resume: no run in {Path('log', script)}; name its folder with --out")
    return Path("log", script, time.strftime("%Y-%m-%d_%H-%M-%S"))


def launch_time():
    """When the process that started this one, torchrun, began (s since 1970)."""
    return psutil.Process(os.getppid()).create_time()


def is_restarted():
    """Whether torchrun started these workers again: only the machine where one failed counts it."""
    count = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    if dist.is_initialized():
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return count > 0


def starting_point(config, checkpoint, device):
    """(config with its preset settled, GPTConfig, canonical weights) from a checkpoint to resume,
    --init, or the seed."""
    if checkpoint:
        weights, model_config = checkpoint["model"], GPTConfig(**checkpoint["model_config"])
    elif config.init != "scratch":
        weights, model_config = load_weights(config.init)
        C = model_config.n_embd
        same = [name for name, preset in PRESETS.items() if preset.n_embd == C]
        if config.preset == "auto":
            config = replace(config, preset=same[0] if same else "tiny" if C < 768 else "gpt2")
        else:
            check_shapes(weights, PRESETS[config.preset], config.init)
    else:
        auto = "gpt2" if device.type == "cuda" else "tiny"
        preset = auto if config.preset == "auto" else config.preset
        config = replace(config, preset=preset)
        weights, model_config = init_weights(PRESETS[preset], config.seed), PRESETS[preset]
    return config, replace(model_config, dropout=config.dropout), weights


def resolve_dtype(config, device):
    """(config with dtype settled, line that says why), in a script that has a choice."""
    if not hasattr(config, "dtype"):
        return config, {"dtype": "float32"}
    dtype, why = choose_dtype(config.dtype, device)
    return replace(config, dtype=dtype), {"dtype": f"{dtype} ({why})"}


def resolve_compile(config, device, notes):
    """The same for compile, with the notes so far."""
    if not hasattr(config, "compile"):
        return config, notes
    compile, why = choose_compile(config.compile, device)
    more = {"compile": f"{compile} ({why})", "recompute": config.recompute}
    return replace(config, compile=compile), notes | more


def optimizer_state(optimizer, model):
    """AdamW's state in canonical layout: {"step": updates done, "exp_avg", "exp_avg_sq": {...}}."""
    named = {name: optimizer.state[p] for name, p in model.named_parameters()
             if p in optimizer.state}
    if not named:
        return {"step": 0}
    moments = {key: to_canonical({name: state[key] for name, state in named.items()},
                                 model.config.vocab_size) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": max(int(state["step"]) for state in named.values()), **moments}


def load_optimizer(optimizer, model, saved):
    """Inverse of optimizer_state, for the same model in any script's layout."""
    if saved["step"] == 0:
        return
    shapes = {name: p.shape for name, p in model.named_parameters()}
    moments = {key: from_canonical(saved[key], shapes) for key in ("exp_avg", "exp_avg_sq")}
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    state = {i: {"step": torch.tensor(float(saved["step"])),
                 **{key: moments[key][name].clone() for key in moments}}
             for i, name in enumerate(order)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def peak_memory(device):
    """The most memory this process has used, in bytes: on CUDA of the GPU, else resident."""
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        return {"peak_memory_bytes": allocated, "peak_allocated_bytes": allocated,
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(device)}
    try:
        import resource  # not on Windows
    except ImportError:
        return {"peak_memory_bytes": psutil.Process().memory_info().peak_wset}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def read_metrics(path):
    """The objects in a metrics.jsonl, up to the first line that was cut short or damaged."""
    rows = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            row["step"] + 0  # what all of them have
        except (ValueError, TypeError, KeyError, RecursionError):
            break
        rows.append(row)
    return rows


def keep_metrics_before(path, step):
    """Drop what a resumed run will write again."""
    if path.exists():
        rows = [row for row in read_metrics(path) if row["step"] < step]
        with replacing(path) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def plot_metrics(out):
    """loss.png: train and validation loss, and the learning rate."""
    from matplotlib.figure import Figure  # without pyplot no display is needed

    rows = read_metrics(out / "metrics.jsonl")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="loss (nats per token)")
    for key, label in (("loss", "train"), ("val_loss", "validation")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        marker = "o" if key == "val_loss" else None
        axes.plot(*zip(*points) if points else ((), ()), label=label, marker=marker)
    rates = [(row["step"], row["lr"]) for row in rows if "lr" in row]
    twin = axes.twinx()
    twin.plot(*zip(*rates) if rates else ((), ()), color="0.7", linestyle="--",
              label="learning rate")
    twin.set_ylabel("learning rate")
    figure.legend(loc="upper right", bbox_to_anchor=(0.9, 0.95))
    figure.savefig(out / "loss.png", dpi=120)
