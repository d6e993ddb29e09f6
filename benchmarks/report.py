"""What ladder.py measured, for people: ladder.md and ladder.png from the content of ladder.json."""

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import replacing, write_json  # noqa: E402

COLORS = {"faster": "#2b6cb0", "slower": "#c05621", "no measurable effect": "#a0aec0"}
TITLES = {"cumulative": "One optimisation after the other", "total": "All together",
          "leave-one-out": "All against all but one", "alone": "00_orig.py with one",
          "recompute": "Recomputation", "settings": "01_opt_single_gpu.py with other settings"}
TICKS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 20)
RATIOS = {"cumulative": "o", "leave-one-out": "s", "alone": "^"}  # a row for each optimisation


def write_report(folder, results, figure=True):
    """Replace ladder.json, ladder.md and, with figure, ladder.png in folder."""
    write_json(folder / "ladder.json", results)
    with replacing(folder / "ladder.md") as file:
        file.write(markdown(results).encode())
    if figure and measured(results["rows"]):
        draw(results).savefig(folder / "ladder.png", dpi=110)


def measured(rows, *modes):
    """Rows that have numbers, of some modes or of all."""
    return [row for row in rows if "ratio" in row and (not modes or row["mode"] in modes)]


def label(row):
    numbered = row["number"] and row["mode"] in RATIOS
    return f"{row['number']} {row['name']}" if numbered else row["name"]


def micro_batches(results):
    """How an update is cut up, in words."""
    small, large = results["small_batch_size"], results["batch_size"]
    return (f"sequences of {results['block_size']}, micro-batches of {small}"
            + f", with [10] of {large}" * (small != large))


def conditions(results, cut=micro_batches):
    """What was measured on what, in one sentence; cut(results) says how an update was cut up."""
    r = results
    return (f"{machine(r['environment'])}: preset {r['preset']}, "
            f"{r['tokens_per_update']:,} tokens per update, {cut(r)}; "
            f"medians of {r['rounds'] * r['updates']} pairs of updates; "
            f"peak {r['peak_flops'] / 1e12:.3g} TFLOP/s ({r['peak_flops_source']}); {r['date']}")


def machine(env):
    """An environment (common.environment) in words."""
    device = env["cpu"] if env["device"] == "cpu" else f"{env['device']} (host {env['cpu']})"
    return f"{device}, CPU threads: {env['threads']}, torch {env['torch']}, Python {env['python']}"


def wrap(text):
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


# -----------------------------------------------------------------------------
# Markdown


def ratio(row):
    """'1.23 (1.21 to 1.25)': median and quartiles of tok/s over tok/s of the row before."""
    first, third = row["ratio_quartiles"]
    return f"{row['ratio']:.2f} ({first:.2f} to {third:.2f})"


def markdown(results):
    """Tables of all modes measured, what was measured on what, and what does not apply."""
    parts = ["# Ladder", wrap(f"{conditions(results)}.")]
    for mode, title in TITLES.items():
        rows = [row for row in results["rows"] if row["mode"] == mode]
        if rows:
            parts += [f"## {title}", table(rows)]
    absent = "\n".join(f"- [{number}]: {reason}"
                       for number, reason in results["not_applicable"].items())
    return "\n\n".join(parts + (["Not applicable here:", absent] if absent else [])) + "\n"


def table(rows):
    lines = ["| | tok/s | x before | memory, GB | before | cold start, s | MFU "
             "| loss differs by | |", "|---" * 9 + "|"]
    if rows[0]["mode"] == "cumulative" and "ratio" in rows[0]:
        speed, memory = rows[0]["tok_per_sec_before"], gigabytes(rows[0], "_before")
        lines.append(f"| 00_orig.py | {speed:,.0f} | | {memory} |" + " |" * 5)
    return "\n".join(lines + [table_row(row) for row in rows])


def table_row(row):
    if "ratio" not in row:
        return f"| {label(row)} |" + " |" * 7 + f" {row['verdict']} |"
    difference = "" if row["loss_difference"] is None else f"{row['loss_difference']:.1e}"
    cells = [label(row), f"{row['tok_per_sec']:,.0f}", ratio(row),
             gigabytes(row), gigabytes(row, "_before"),
             f"{row['cold_start_s'][0]:.1f}", f"{row['mfu']:.1%}", difference,
             row["verdict"] if row["losses_agree"]
             else f"LOSSES DIFFER (limit {row['loss_limit']:g})"]
    return f"| {' | '.join(cells)} |"


def gigabytes(row, side=""):
    return f"{row['peak_memory_bytes' + side] / 1e9:.2f}"


# -----------------------------------------------------------------------------
# Figure


def draw(results):
    """matplotlib Figure: a panel of bars for each kind of comparison, and one of all ratios."""
    from matplotlib.figure import Figure  # without pyplot no display is needed

    rows = results["rows"]
    panels = [(draw_bars, TITLES[mode], measured(rows, mode))
              for mode in ("cumulative", "recompute", "settings")]
    panels.insert(1, (draw_ratios, "tok/s over tok/s before: median and quartiles",
                      measured(rows, *RATIOS)))
    panels = [panel for panel in panels if panel[2]]
    heights = [2 + len({label(row) for row in panel[2]}) for panel in panels]
    figure = Figure(figsize=(10, 0.36 * sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for place, (panel, title, panel_rows) in zip(grid, panels):
        panel(figure, place, title, panel_rows)
    figure.suptitle(f"{results['preset']}: {machine(results['environment'])}",
                    x=0.01, ha="left", weight="bold")
    return figure


def draw_bars(figure, place, title, rows):
    """tok/s and peak memory of each row, below what it is compared with."""
    cells = place.subgridspec(1, 2, width_ratios=(3, 1))
    speed, memory = (figure.add_subplot(cell) for cell in cells)
    bars = {}  # name: (tok/s, bytes, color, text)
    for row in rows:
        T = row["settings"].get("block_size")
        other = f"off, T = {T}" if T else "as chosen"
        start = "00_orig.py" if row["mode"] == "cumulative" else other
        if start not in bars and (row["mode"] != "cumulative" or not bars):
            bars[start] = (row["tok_per_sec_before"], row["peak_memory_bytes_before"],
                           "#2d3748", "")
        bars[label(row)] = (row["tok_per_sec"], row["peak_memory_bytes"],
                            COLORS[row["verdict"]], f"   x {row['ratio']:.2f}")
    speeds, sizes, colors, texts = zip(*bars.values())
    patches = speed.barh(list(bars), speeds, color=colors)
    speed.bar_label(patches, [f" {value:,.0f}{text}" for value, text in zip(speeds, texts)],
                    fontsize=9)
    speed.set_xlim(0, max(speeds) * 1.25)
    speed.set_title(f"{title}: tok/s, x before", loc="left", fontsize=10)
    if rows[0]["mode"] == "cumulative":
        keys = [speed.barh(0, 0, color=color) for color in COLORS.values()]
        speed.legend(keys, COLORS, loc="upper right", fontsize=8, frameon=False)
    patches = memory.barh(list(bars), [size / 1e9 for size in sizes], color="#cbd5e0")
    memory.bar_label(patches, fmt=" %.1f", fontsize=9)
    memory.set_xlim(0, max(sizes) / 1e9 * 1.25)
    memory.set_title("peak memory, GB", loc="left", fontsize=10)
    memory.set_yticks([])
    for axes in (speed, memory):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)


def draw_ratios(figure, place, title, rows):
    """Ratios on a logarithmic axis, a line for each optimisation, a mark for each mode."""
    from matplotlib.ticker import ScalarFormatter

    axes = figure.add_subplot(place)
    names = list(dict.fromkeys(map(label, rows)))
    modes = [mode for mode in RATIOS if measured(rows, mode)]
    for i, mode in enumerate(modes):
        chosen = measured(rows, mode)
        places = [names.index(label(row)) + 0.22 * (i - (len(modes) - 1) / 2) for row in chosen]
        spread = [[abs(row["ratio"] - row["ratio_quartiles"][side]) for row in chosen]
                  for side in (0, 1)]
        axes.errorbar([row["ratio"] for row in chosen], places, xerr=spread, fmt=RATIOS[mode],
                      markersize=5, capsize=2, label=TITLES[mode])
    edges = [1, *(edge for row in rows for edge in row["ratio_quartiles"])]
    axes.axvline(1, color="0.6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([t for t in TICKS if 0.9 * min(edges) < t < 1.1 * max(edges)])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.93")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
