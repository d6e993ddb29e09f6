"""
What each optimisation gains here: speed, memory, start-up, and whether the losses stay the same.
Run: python benchmarks/ladder.py [--mode cumulative leave-one-out alone recompute settings]
                                 [--preset gpt2] [--out DIR]
  cumulative     00_orig.py, then one optimisation after the other on top
  leave-one-out  all of 01_opt_single_gpu.py against all but one
  alone          00_orig.py against 00_orig.py with one
  recompute      01 with --recompute off, mlp and block, at half and at full --block-size
  settings       01 with other dtypes, compile modes and micro-batches
A variant's model is 00's source with the hunks of the chosen numbers taken from 01; its update is
that of the scripts, on random tokens. Each variant trains in a process of its own; the two of a
pair take turns, update by update, so that whatever slows the machine down meets both. DIR gets
ladder.json, ladder.md and ladder.png. Exit code 1: losses differ.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import run  # noqa: E402
from common import (  # noqa: E402
    PRESETS, ArgumentParser, Data, UserError, check_writable, choose_compile, choose_dtype,
    environment, get_device, peak_flops, print0, run_cli)
from report import write_report  # noqa: E402
from variants import (  # noqa: E402
    BFLOAT16, COMPILE, MEMORY_REUSE, MERGED_QKV, MICRO_BATCH, PINNED_MEMORY, RECOMPUTATION, TF32,
    Failed, Pool, Variant, Worker, names, single)

ORDER = [*range(1, 9), MEMORY_REUSE, COMPILE, MICRO_BATCH, RECOMPUTATION]  # of cumulative rows
MODES = ("cumulative", "leave-one-out", "alone", "recompute", "settings")

# -----------------------------------------------------------------------------
# Pairs: what is compared with what


@dataclass(frozen=True)
class Pair:
    """One row: variant after against variant before."""
    mode: str
    number: int | None
    name: str
    before: Variant
    after: Variant


def plan(modes, rows, applicable, config, changes=("dtype", "compile", "batch-size")):
    """Pairs of modes for the numbers in rows, of which applicable work; config: the full set's."""
    chosen = [number for number in ORDER if number in rows and number in applicable]
    full = frozenset(applicable) - {RECOMPUTATION}  # which 01 leaves off by default
    makers = {"cumulative": lambda: cumulative(chosen),
              "leave-one-out": lambda: leave_one_out(chosen, full),
              "alone": lambda: alone(chosen), "recompute": lambda: recompute(full, config),
              "settings": lambda: other_settings(full, config, changes)}
    return [pair for mode in modes for pair in makers[mode]()]


def cumulative(chosen):
    sets = [Variant(frozenset(chosen[:i])) for i in range(len(chosen) + 1)]
    pairs = [Pair("cumulative", n, names()[n], *sets[i : i + 2]) for i, n in enumerate(chosen)]
    together = Variant(frozenset(chosen) - {RECOMPUTATION})
    if len(together.numbers) > 1:
        name = "all but recomputation" if RECOMPUTATION in chosen else "all of these"
        pairs.append(Pair("total", None, name, sets[0], together))
    return pairs


def leave_one_out(chosen, full):
    return [Pair("leave-one-out", n, names()[n], Variant(full - {n}), Variant(full))
            for n in chosen if n in full]


def alone(chosen):
    return [Pair("alone", n, names()[n], Variant(frozenset()), Variant(frozenset({n})))
            for n in chosen]


def recompute(full, config):
    """mlp and block against off, at half and at full length, the tokens of an update the same."""
    for T in [config.block_size // 2] * (config.block_size % 2 == 0) + [config.block_size]:
        settings = {"block_size": T, "batch_size": config.total_batch_size // T}
        off = Variant(full | {MICRO_BATCH}, tuple(settings.items()))
        for kind in ("mlp", "block"):
            yield Pair("recompute", RECOMPUTATION, f"{kind}, T = {T}", off,
                       replace(off, settings=off.settings + (("recompute", kind),)))


def other_settings(full, config, changes):
    """The full set with one setting changed; micro-batches grow until one does not fit."""
    modes = ("off", "default") + ("reduce-overhead", "max-autotune") * (config.device == "cuda")
    values = {"dtype": ("float32", "bfloat16", "float16"), "compile": modes,
              "batch-size": [config.batch_size * factor for factor in (2, 4, 8, 16)]}
    base = Variant(full | {MICRO_BATCH})
    needs = {"dtype": BFLOAT16, "compile": COMPILE}  # what is not in the full set cannot be set
    for change in changes:
        key = change.replace("-", "_")
        for value in values[change] if needs.get(change, MERGED_QKV) in full else ():
            if getattr(config, key) != value:
                total = (("total_batch_size", value * config.block_size),) * (key == "batch_size")
                yield Pair("settings", None, f"{change} {value}", base,
                           Variant(base.numbers, ((key, value), *total)))


# -----------------------------------------------------------------------------
# Measuring and comparing


def measure(pool, pair, updates, progress):
    """Both variants take turns: for each {"timed": updates, "cold_start_s", "losses": of all}."""
    workers = pool.get(pair.before, pair.after)
    timed = ([], [])
    for i in range(updates):
        for side in (0, 1) if i % 2 == 0 else (1, 0):  # neither is always first
            timed[side].append(workers[side].update())
            progress.update()
    common = min(len(worker.updates) for worker in workers)
    return [{"timed": timed[side], "cold_start_s": worker.updates[0]["dt"],
             "losses": [update["loss"] for update in worker.updates[:common]]}
            for side, worker in enumerate(workers)]


def compare(pair, samples, limit, mfu):
    """The row of pair from one sample a round. limit: how far losses may differ; mfu: of tok/s."""
    before, after = ([update for sample in samples for update in sample[side]["timed"]]
                     for side in (0, 1))
    ratios = [a["tok_per_sec"] / b["tok_per_sec"] for b, a in zip(before, after)]
    first, middle, third = statistics.quantiles(ratios, n=4, method="inclusive")
    speed_before, speed = (statistics.median(update["tok_per_sec"] for update in side)
                           for side in (before, after))
    losses = [losses for sample in samples
              for losses in zip(sample[0]["losses"], sample[1]["losses"])]
    difference = max(abs(b - a) for b, a in losses) if limit else None
    return {**identify(pair),
            "tok_per_sec_before": speed_before, "tok_per_sec": speed, "mfu": mfu(speed),
            "ratio": middle, "ratio_quartiles": [first, third], "verdict": verdict(first, third),
            "peak_memory_bytes": max(update["peak_memory_bytes"] for update in after),
            "peak_memory_bytes_before": max(update["peak_memory_bytes"] for update in before),
            "cold_start_s": [sample[1]["cold_start_s"] for sample in samples],
            "loss": losses[-1][1], "loss_difference": difference, "loss_limit": limit,
            "losses_agree": limit is None or all(abs(b - a) <= limit for b, a in losses),
            "dt_before": [update["dt"] for update in before],
            "dt": [update["dt"] for update in after]}


def identify(pair):
    return {"mode": pair.mode, "number": pair.number, "name": pair.name,
            "before": sorted(pair.before.numbers), "after": sorted(pair.after.numbers),
            "settings": dict(pair.after.settings)}


def verdict(first, third):
    """From the quartiles of tok/s over tok/s before, as they are printed: two decimals."""
    if round(first, 2) > 1:
        return "faster"
    return "slower" if round(third, 2) < 1 else "no measurable effect"


def changed_total(pair):
    """Tokens per update where pair changes them, else 0."""
    return dict(pair.after.settings).get("total_batch_size", 0)


def loss_limit(pair):
    """How far losses may differ: None where the variants do not see the same batches."""
    if changed_total(pair):
        return None
    return 2e-2 if {TF32, BFLOAT16} & (pair.before.numbers | pair.after.numbers) else 1e-3


class Ladder:
    """Measures pairs, round by round, and writes what it knows after each."""

    def __init__(self, args, config, model_config, small_batch_size, absent, cache):
        self.args, self.config, self.model_config = args, config, model_config
        self.small, self.samples, self.failures, self.stand_in = small_batch_size, {}, {}, {}
        device = get_device(config.device)
        self.peak, source = peak_flops(device, getattr(torch, config.dtype))
        self.facts = {
            "environment": environment(device), "date": time.strftime("%Y-%m-%d"),
            "preset": args.preset, "tokens_per_update": config.total_batch_size,
            "block_size": config.block_size, "batch_size": config.batch_size,
            "small_batch_size": small_batch_size, "dtype": config.dtype,
            "compile": config.compile, "updates": args.updates, "rounds": args.rounds,
            "order": ORDER, "not_applicable": absent, "peak_flops": self.peak,
            "peak_flops_source": source}
        self.pool = Pool(lambda variant: Worker(variant, self.task(variant), cache))

    def task(self, variant):
        return variant.configure(self.config, self.small), self.model_config

    def run(self, pairs):
        total = 2 * self.args.rounds * len(pairs) * self.args.updates
        with tqdm(total=total, unit="update", dynamic_ncols=True,
                  disable=not sys.stderr.isatty()) as progress:
            for _, pair in itertools.product(range(self.args.rounds), pairs):
                progress.set_description(f"{pair.mode}: {pair.name}"[:36])
                self.measure(pair, progress)
                self.write(pairs)
                if pair == pairs[-1]:
                    self.pool.close()  # the next round starts anew
        return self.rows(pairs)

    def measure(self, pair, progress):
        """One pair once more; where its before failed, against what stands in for it."""
        if pair in self.failures or self.outgrown(pair):
            return
        try:
            against = replace(pair, before=self.stand_in.get(pair.before, pair.before))
            sample = measure(self.pool, against, self.args.updates, progress)
            self.samples.setdefault(pair, []).append(sample)
        except Failed as failure:
            self.failures[pair] = str(failure)
            if failure.variant == pair.after:
                self.stand_in[pair.after] = self.stand_in.get(pair.before, pair.before)
        print0(describe(self.row(pair)))

    def outgrown(self, pair):
        """Whether a smaller micro-batch than that of pair was too large already."""
        return any(0 < changed_total(failed) < changed_total(pair) for failed in self.failures)

    def row(self, pair):
        if pair in self.failures:
            return identify(pair) | {"verdict": f"failed: {self.failures[pair]}",
                                     "losses_agree": True}
        T = dict(pair.after.settings).get("block_size", self.config.block_size)
        flops = run.flops_per_token(self.model_config, T)
        used = replace(pair, before=self.stand_in.get(pair.before, pair.before))
        return compare(used, self.samples[pair], loss_limit(pair),
                       lambda speed: flops * speed / self.peak)

    def rows(self, pairs):
        return [self.row(pair) for pair in pairs if pair in self.samples or pair in self.failures]

    def write(self, pairs, figure=False):
        write_report(Path(self.args.out), self.facts | {"rows": self.rows(pairs)}, figure)


def describe(row):
    """A row as one line for the terminal."""
    number = f"[{row['number']}] " if row["number"] else ""
    head = f"{row['mode']:<13} {number + row['name']:<26}"
    if "ratio" not in row:
        return f"{head} {row['verdict']}"
    agree = ""
    if not row["losses_agree"]:
        agree = f", LOSSES DIFFER by {row['loss_difference']:.2g}, more than {row['loss_limit']:g}"
    first, third = row["ratio_quartiles"]
    return (f"{head} {row['tok_per_sec']:>9,.0f} tok/s, "
            f"x {row['ratio']:.2f} ({first:.2f} to {third:.2f}), "
            f"{row['peak_memory_bytes'] / 1e9:.2f} GB, {row['verdict']}{agree}")


# -----------------------------------------------------------------------------
# Command line


def parse_args(argv=None):
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--mode", nargs="+", choices=(*MODES, "all"), default=["cumulative"],
        help="see above; all: the first three")
    changes = ("dtype", "compile", "batch-size")
    add("--change", nargs="+", choices=changes, default=changes,
        help="settings to change in --mode settings (default: all)")
    add("--rows", nargs="+", type=int, default=ORDER, metavar="N",
        help="optimisations by number (default: all)")
    add("--preset", default="auto", help="model; auto: gpt2 on CUDA, tiny elsewhere")
    add("--batch-size", type=int, metavar="B", help="sequences of an update and of a micro-batch")
    add("--small-batch-size", type=int, metavar="B",
        help="the same without [10] (default: at most 4)")
    add("--block-size", type=int, metavar="T", help="tokens of a sequence (default: the model's)")
    add("--updates", type=int, default=8, metavar="N",
        help="timed updates of each variant in a pair (default: 8)")
    add("--rounds", type=int, default=2, metavar="N",
        help="times that all is measured, in new processes (default: 2)")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="where to train")
    add("--out", default="log/ladder", metavar="DIR",
        help="what to write into (default: log/ladder)")
    return parser.parse_args(argv)


def check_args(args):
    for ok, message in (
            (args.preset in PRESETS,
             f"--preset {args.preset}: there are auto, {', '.join(PRESETS)}"),
            (args.updates >= 3, f"--updates {args.updates}: quartiles need 3 or more"),
            (args.rounds >= 1, f"--rounds {args.rounds}: must be 1 or more"),
            (set(args.rows) <= set(ORDER),
             f"--rows {' '.join(map(str, args.rows))}: there are 1 to {len(ORDER)}")):
        if not ok:
            raise UserError(message)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be made ({error.strerror}); "
                        "choose another folder") from error
    check_writable(Path(args.out) / "ladder.json")


def full_config(args, device):
    """(Config of the full set with nothing left open, {number: why it makes no sense here})."""
    dtype, why_dtype = choose_dtype("auto", device)
    compile, why_compile = choose_compile("auto", device)
    model_config = PRESETS[args.preset]
    T = args.block_size or model_config.block_size
    config = single.Config(preset=args.preset, device=device.type, dtype=dtype, compile=compile,
                           max_steps=1000, warmup_steps=10, batch_size=args.batch_size,
                           block_size=args.block_size,
                           total_batch_size=args.batch_size and args.batch_size * T)
    data = Data([], [], [], [], "random tokens", is_text=True)
    config = run.resolve(config, model_config, data, device, 64)
    if args.batch_size is None:  # an update is one micro-batch of what fits
        config = replace(config, total_batch_size=config.batch_size * T)
    absent = {BFLOAT16: why_dtype} if dtype == "float32" else {}
    return config, absent | ({COMPILE: why_compile} if compile == "off" else {}) | absent_on(device)


def absent_on(device):
    """{number: why} of what device has no use for."""
    cuda = device.type == "cuda"
    tf32 = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    absent = {} if tf32 else {TF32: "GPUs from Ampere on"}
    if not cuda:
        absent[PINNED_MEMORY] = "CUDA only"
    if device.type != "cpu" or sys.platform != "linux":
        absent[MEMORY_REUSE] = "CPU on Linux only"
    return absent


def small_batch(args, config):
    """Micro-batch without [10]: as asked, else the most up to 4 (00's own) that divide that."""
    B = config.batch_size
    divisors = (b for b in range(1, min(4, B - 1) + 1) if B % b == 0)
    small = args.small_batch_size or max(divisors, default=1)
    if not 1 <= small <= B or B % small:
        raise UserError(f"--small-batch-size {small}: must divide --batch-size {B}")
    return small


def warn_if_busy():
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if load > 0.5:
        print0(f"warning: other work is running here (load {load:.1f}): "
               "tok/s are too low, and the spread is wide")


def main(argv=None):
    args = parse_args(argv)
    device = get_device(args.device)
    if args.preset == "auto":
        args.preset = "gpt2" if device.type == "cuda" else "tiny"
    check_args(args)
    modes = list(dict.fromkeys(m for mode in args.mode
                               for m in (MODES[:3] if mode == "all" else [mode])))
    config, absent = full_config(args, device)
    small = small_batch(args, config)
    if small == config.batch_size:
        absent[MICRO_BATCH] = f"an update is one micro-batch of {small} already"
    warn_if_busy()
    pairs = plan(modes, args.rows, [n for n in ORDER if n not in absent], config, args.change)
    if not pairs:
        reasons = "; ".join(f"[{n}] {names()[n]}: {why}" for n, why in absent.items())
        raise UserError(f"nothing to measure: {reasons}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # empty: a cold start
        ladder = Ladder(args, config, PRESETS[args.preset], small, absent, cache)
        try:
            rows = ladder.run(pairs)
        finally:
            ladder.pool.close()
            ladder.write(pairs, figure=True)
    print0(f"ladder.json, ladder.md and ladder.png are in {args.out}")
    sys.exit(0 if all(row["losses_agree"] for row in rows) else 1)


if __name__ == "__main__":
    run_cli(main)
