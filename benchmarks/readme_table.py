"""
Fill the measured parts of README.md, between their markers, from result files, no number by hand.
Run: python benchmarks/readme_table.py [--ladder log/ladder/ladder.json] [--recompute JSON]
                                       [--log RUN_FOLDER]
  --ladder     the last two columns of the ladder's table, and a line on what was measured on what
  --recompute  speed and memory of --recompute mlp and block (ladder.py --mode recompute)
  --log        a run of 01 to compare one's own with: losses and tok/s at each validation
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from common import ArgumentParser, UserError, replacing, run_cli  # noqa: E402
from report import conditions, gigabytes, machine, ratio, wrap  # noqa: E402
from run import read_metrics  # noqa: E402


def replace_between(text, name, content):
    """text with content(old) in place of old, the part between the begin and end marker of name."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"the README needs one line {begin.strip()} and, below it, one line {end}")
    head, rest = text.split(begin)
    old, tail = rest.split(end)
    return head + begin + content(old) + end + tail


# -----------------------------------------------------------------------------
# The ladder


def fill_ladder(old, results):
    """The table old with tok/s and x before where these were measured, and below it how."""
    rows = {row["number"]: row for row in results["rows"] if row["mode"] == "cumulative"}
    if not rows:
        raise UserError("the results have no cumulative rows: "
                        "measure them with benchmarks/ladder.py --mode cumulative")
    absent = {int(number): reason for number, reason in results["not_applicable"].items()}
    table = [fill_row(line, rows, absent) for line in old.splitlines() if line.startswith("|")]
    return "\n".join(table) + f"\n\n{caption(results, rows)}\n"


def fill_row(line, rows, absent):
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if len(cells) != 6:
        raise UserError(f"a row of the ladder's table has {len(cells)} cells, not 6: {line}")
    number = int(cells[0]) if cells[0].isdecimal() else None
    if number in absent:
        cells[4:] = "", f"not here: {absent[number]}"
    elif number in rows and "ratio" in rows[number]:
        cells[4:] = f"{rows[number]['tok_per_sec']:,.0f}", ratio(rows[number])
    elif number in rows:
        cells[4:] = "", rows[number]["verdict"]
    else:
        return line
    return re.sub(" {2,}", " ", f"| {' | '.join(cells)} |")


def caption(results, rows):
    """What the two columns mean, the whole way from 00 on, and the conditions."""
    first = next(row for row in results["rows"] if row["mode"] == "cumulative")
    whole = [f", {row['name']} {row['tok_per_sec']:,.0f} tok/s: x {ratio(row)}"
             for row in results["rows"] if row["mode"] == "total" and "ratio" in row]
    start = f"`00_orig.py` {first['tok_per_sec_before']:,.0f} tok/s" if "ratio" in first else ""
    order = ", ".join(str(number) for number in results["order"] if number in rows)
    return wrap(f"Each row adds its optimisation to those before it, in the order {order}. "
                "In brackets the quartiles of paired updates: where they include 1.00, no effect "
                f"could be measured. {start}{''.join(whole)}. tok/s of different rows were taken "
                "at different times; on a machine whose speed drifts only the ratios compare. "
                f"Measured by `benchmarks/ladder.py` on {conditions(results)}.")


# -----------------------------------------------------------------------------
# Recomputation


def recompute_table(results):
    """Speed and memory of each kind and length beside those without."""
    rows = [row for row in results["rows"] if row["mode"] == "recompute" and "ratio" in row]
    if not rows:
        raise UserError("the results have no recompute rows: "
                        "measure them with benchmarks/ladder.py --mode recompute")
    lines = ["| `--recompute` | tok/s | x off | peak memory | off |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['name']} | {row['tok_per_sec']:,.0f} | {ratio(row)} | "
                     f"{gigabytes(row)} GB | {gigabytes(row, '_before')} GB |")
    text = conditions(results, cut=lambda _: "all in one micro-batch")
    source = f"Measured by `benchmarks/ladder.py --mode recompute` on {text}."
    return "\n".join(lines) + f"\n\n{wrap(source)}\n"


# -----------------------------------------------------------------------------
# The reference log


def reference_log(folder):
    """Losses and tok/s of the run in folder at each validation, and what it ran on."""
    try:
        rows = read_metrics(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--log {folder}: not the folder of a finished run ({error})") from error
    updates = {row["step"]: row for row in rows if "loss" in row}
    lines, last = ["    step   train loss   val loss         lr   norm     tok/s"], 0
    for row in (row for row in rows if "val_loss" in row):
        step = row["step"]
        loss = lr = norm = "-"  # there is no update after the last
        if update := updates.get(step):
            loss, lr = f"{update['loss']:.4f}", f"{update['lr']:.2e}"
            norm = "-" if update["grad_norm"] is None else f"{update['grad_norm']:.2f}"
        timed = range(max(last, 1), step)  # 0 is the cold start
        speeds = [updates[i]["tok_per_sec"] for i in timed if i in updates]
        speed = f"{statistics.median(speeds):,.0f}" if speeds else "-"
        lines.append(f"    {step:>4}   {loss:>10}   {row['val_loss']:>8.4f}   {lr:>8}   "
                     f"{norm:>4}   {speed:>7}")
        last = step
    return "\n".join(lines) + f"\n\n{log_caption(summary)}\n"


def log_caption(summary):
    config = summary["config"]
    start = summary["cold_start_s"]
    cold = f", {start:.0f} s for the first update" if start is not None else ""
    return wrap(f"`{summary['script']}.py`, preset {config['preset']}, "
                f"{config['total_batch_size']:,} tokens per update, "
                f"{config.get('dtype', 'float32')}, compile {config.get('compile', 'off')}, "
                f"seed {config['seed']}, data: {summary['data']}{cold}; "
                f"{machine(summary['environment'])}.")


def read(flag, path, parse):
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path}: cannot be read ({error})") from error


def main(argv=None):
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--ladder", type=Path, metavar="JSON", help="what benchmarks/ladder.py wrote")
    add("--recompute", type=Path, metavar="JSON", help="the same of --mode recompute")
    add("--log", type=Path, metavar="FOLDER", help="run folder of a training script")
    add("--readme", type=Path, default=ROOT / "README.md",
        help="file to change (default: README.md)")
    args = parser.parse_args(argv)
    if not (args.ladder or args.recompute or args.log):
        raise UserError("nothing to fill in: give --ladder JSON, --recompute JSON, --log FOLDER")
    text = read("--readme", args.readme, str)
    if args.ladder:
        results = read("--ladder", args.ladder, json.loads)
        text = replace_between(text, "ladder", lambda old: fill_ladder(old, results))
    if args.recompute:
        table = recompute_table(read("--recompute", args.recompute, json.loads))
        text = replace_between(text, "recompute", lambda old: table)
    if args.log:
        text = replace_between(text, "reference-log", lambda old: reference_log(args.log))
    with replacing(args.readme) as file:
        file.write(text.encode())


if __name__ == "__main__":
    run_cli(main)
