"""Benchmarks: variants are the scripts' own code, pairs are compared honestly, README is filled."""

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import MICRO, ROOT, command, environ

import check_numerics
import common
import run

sys.path.insert(0, str(ROOT / "benchmarks"))

import ladder  # noqa: E402
import readme_table  # noqa: E402
import report  # noqa: E402
import variants  # noqa: E402

orig, single = (importlib.import_module(name) for name in ("00_orig", "01_opt_single_gpu"))
CPU = torch.device("cpu")
CONFIG = single.Config(preset="tiny", device="cpu", dtype="bfloat16", compile="default",
                       batch_size=4, block_size=16, total_batch_size=64, max_steps=100,
                       warmup_steps=10, learning_rate=1e-3, min_lr=1e-4)
ALL = [n for n in ladder.ORDER if n not in (ladder.TF32, ladder.PINNED_MEMORY)]


def definitions(source):
    """{name: source} of the classes and functions of a script, without main() and Config."""
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            and node.name not in ("main", "Config")}


# Variants


def test_all_hunks_of_the_model_give_01_and_none_gives_00():
    text_00, text_01 = ((ROOT / f"{name}.py").read_text(encoding="utf-8")
                        for name in ("00_orig", "01_opt_single_gpu"))
    assert definitions(variants.model_source(variants.IN_MODEL)) == definitions(text_01)
    assert variants.model_source(range(5, 13)) == text_00
    assert definitions(text_00) != definitions(text_01)


@pytest.mark.parametrize("number, change", [
    (variants.MERGED_QKV, "self.c_attn = nn.Linear"),
    (variants.SDPA, "F.scaled_dot_product_attention"), (variants.NATIVE_OPS, "F.layer_norm"),
    (variants.PADDED_VOCABULARY, "math.ceil(config.vocab_size / 64)")])
def test_each_number_brings_its_own_change_alone(number, change):
    assert change in variants.model_source({number})
    assert change not in variants.model_source(variants.IN_MODEL - {number})


def test_constants_are_the_numbers_of_01():
    short = {n: re.sub("^(torch[.]|larger )", "", name) for n, name in variants.names().items()}
    constants = {n: getattr(variants, re.sub("[ -]", "_", name).upper())
                 for n, name in short.items()}
    assert constants == {n: n for n in range(1, 13)}
    assert sorted(ladder.ORDER) == list(range(1, 13))


@pytest.mark.parametrize("numbers", [
    n for k in range(5) for n in itertools.combinations(sorted(variants.IN_MODEL), k)])
def test_every_mixture_of_hunks_computes_the_same_loss(numbers):
    weights = common.init_weights(MICRO, seed=0)
    idx = torch.randint(MICRO.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (orig.GPT(MICRO), variants.model_module(numbers).GPT(MICRO)):
        common.load_canonical(model, weights)
        losses.append(model(idx[:, :-1], idx[:, 1:]).item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("method", ["prepare", "update"])
def test_training_is_written_as_01_writes_it(method):
    """Each statement of Training's methods stands in 01's main(), in that order, or is its own."""
    theirs = [line.split("  # ")[0].strip() for line in inspect.getsource(single.main).splitlines()]
    own = {"prepare": ["config, model =", "if mixed:"],
           "update": ["config, optimizer", "grad_accum_steps =", "self.step += 1",
                      '"tok_per_sec"']}[method]
    text = inspect.getsource(getattr(variants.Training, method))
    text = re.sub(r"\(\n +", "(", text)  # one line there, wrapped here
    for ours, their in (("self.device", "device"), ("self.batches", "train_batches"),
                        ("self.model(", "model("), ("self.raw_model", "raw_model"),
                        ("self.step)", "step)"), ("self.step,", "step,"),
                        ("self.get_lr", "get_lr"), ("config.grad_clip", "max_norm")):
        text = text.replace(ours, their)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shared = [line for line in lines if not line.startswith(("def ", '"""', "return ", *own))]
    assert [line for line in shared if line not in theirs] == []
    assert shared == sorted(shared, key=theirs.index) and len(shared) > 8


def test_settings_follow_from_the_numbers():
    def settings(c):
        return c.dtype, c.compile, c.recompute, c.batch_size

    plain = variants.Variant(frozenset()).configure(CONFIG, 2)
    assert settings(plain) == ("float32", "off", "off", 2)
    full = variants.Variant(frozenset(ALL), (("compile", "max-autotune"),)).configure(CONFIG, 2)
    assert settings(full) == ("bfloat16", "max-autotune", "block", 4)


def test_training_uses_what_its_numbers_say(monkeypatch):
    reused = []
    monkeypatch.setattr(variants, "keep_freed_memory", lambda: reused.append(True))
    some = [variants.FUSED_ADAMW, variants.MEMORY_REUSE, variants.BFLOAT16]
    training = {n: variants.Training(v, v.configure(CONFIG, 2), MICRO)
                for n, v in [(len(n), variants.Variant(frozenset(n))) for n in ([], some)]}
    assert reused == [True]
    assert [training[n].optimizer.defaults["fused"] for n in (0, 3)] == [None, True]
    losses = [[training[n].update()["loss"] for _ in range(3)] for n in (0, 3)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-2) and losses[0] != losses[1]
    idx = torch.zeros(1, 4, dtype=torch.int64)
    assert [training[n].raw_model(idx).dtype for n in (0, 3)] == [torch.float32, torch.bfloat16]


# Pairs and statistics


def test_cumulative_rows_add_one_optimisation_each():
    pairs = ladder.plan(["cumulative"], ladder.ORDER, ALL, CONFIG)
    steps = [pair for pair in pairs if pair.mode == "cumulative"]
    assert [pair.number for pair in steps] == ALL
    assert all(pair.after.numbers - pair.before.numbers == {pair.number} for pair in steps)
    assert all(a.after == b.before for a, b in zip(steps, steps[1:]))
    assert not steps[0].before.numbers
    assert pairs[-1].mode == "total" and pairs[-1].before == steps[0].before
    assert pairs[-1].after.numbers == set(ALL) - {ladder.RECOMPUTATION}


def test_leave_one_out_and_alone_differ_in_one():
    full = set(ALL) - {ladder.RECOMPUTATION}
    for pair in ladder.plan(["leave-one-out"], ladder.ORDER, ALL, CONFIG):
        assert pair.after.numbers == full == pair.before.numbers | {pair.number}
    alone = ladder.plan(["alone"], [3, 7, ladder.PINNED_MEMORY], ALL, CONFIG)
    assert [(sorted(pair.before.numbers), sorted(pair.after.numbers)) for pair in alone] == [
        ([], [3]), ([], [7])]


def test_recompute_and_settings_change_what_they_say():
    pairs = ladder.plan(["recompute"], ladder.ORDER, ALL, CONFIG)
    configs = [pair.after.configure(CONFIG, 2) for pair in pairs]
    assert [(c.recompute, c.block_size, c.batch_size) for c in configs] == [
        ("mlp", 8, 8), ("block", 8, 8), ("mlp", 16, 4), ("block", 16, 4)]
    pairs = ladder.plan(["settings"], ladder.ORDER, ALL, CONFIG)
    assert [pair.name for pair in pairs] == [
        "dtype float32", "dtype float16", "compile off",
        "batch-size 8", "batch-size 16", "batch-size 32", "batch-size 64"]
    c = pairs[3].after.configure(CONFIG, 2)
    assert (c.batch_size, c.total_batch_size) == (8, 128) and ladder.loss_limit(pairs[3]) is None


def sample(before, after, losses=((10.9, 10.8), (10.9, 10.8)), memory=1e9):
    """What measure() returns, for made-up tok/s."""
    return [{"timed": [{"tok_per_sec": speed, "dt": 1 / speed, "peak_memory_bytes": memory}
                       for speed in side],
             "cold_start_s": 2.0, "losses": list(losses[i])}
            for i, side in enumerate((before, after))]


def pair_of(number, before=(), settings=(), mode="cumulative"):
    after = frozenset(before) | ({number} if number else set())
    return ladder.Pair(mode, number, variants.names().get(number, "some"),
                       variants.Variant(frozenset(before)), variants.Variant(after, settings))


def row_of(number, *samples, **options):
    pair = pair_of(number, **options)
    return ladder.compare(pair, samples, ladder.loss_limit(pair), lambda speed: speed / 1000)


def test_ratios_are_of_updates_side_by_side_so_that_drift_cancels():
    drift = [100, 50, 200, 80, 120]
    row = row_of(3, sample(drift, [1.5 * speed for speed in drift]))
    assert row["ratio"] == pytest.approx(1.5)
    assert row["ratio_quartiles"] == pytest.approx([1.5, 1.5])
    assert (row["verdict"], row["tok_per_sec"], row["mfu"]) == ("faster", 150, 0.15)


def test_rounds_are_pooled():
    row = row_of(3, sample([100, 100], [110, 120]), sample([100, 100], [130, 140]))
    assert row["ratio"] == pytest.approx(1.25)
    assert row["ratio_quartiles"] == pytest.approx([1.175, 1.325])
    assert row["cold_start_s"] == [2.0, 2.0] and len(row["dt"]) == 4


@pytest.mark.parametrize("after, verdict", [
    ([110, 112, 111], "faster"), ([90, 91, 92], "slower"), ([97, 104, 103], "no measurable effect"),
    ([100.2, 100.3, 100.4], "no measurable effect"), ([99.7, 99.8, 99.9], "no measurable effect")])
def test_verdict_follows_the_quartiles_as_printed(after, verdict):
    assert row_of(3, sample([100] * 3, after))["verdict"] == verdict


@pytest.mark.parametrize("number, off, agree", [
    (3, 9e-4, True), (3, 2e-3, False), (6, 1.9e-2, True), (6, 3e-2, False),
    (3, float("nan"), False)])
def test_losses_are_held_to_the_tolerance_of_their_precision(number, off, agree):
    row = row_of(number, sample([100] * 3, [100] * 3, losses=((10.0, 9.0), (10.0, 9.0 + off))))
    assert row["losses_agree"] is agree
    assert ("LOSSES DIFFER" in ladder.describe(row)) is not agree


class FakeWorker:
    """Stands for a process: counts turns, and fails where it is told to."""
    log = []

    def __init__(self, variant, fails=()):
        if variant in fails:
            raise variants.Failed(variant, "out of memory")
        self.variant, self.updates, self.process = variant, [{"dt": 9.0, "loss": 1.0}], self

    def is_alive(self):
        return True

    def loss(self):
        return 1.0

    def update(self):
        self.log.append(len(self.variant.numbers))
        self.updates.append({"dt": 1.0, "loss": self.loss(), "peak_memory_bytes": 10,
                             "tok_per_sec": 64.0 * 2 ** len(self.variant.numbers)})
        return self.updates[-1]

    def close(self):
        self.log.append("closed")


def fake_ladder(tmp_path, monkeypatch, fails=(), rounds=1):
    args = ladder.parse_args(["--updates", "4", "--rounds", str(rounds), "--out", str(tmp_path),
                              "--preset", "tiny"])
    monkeypatch.setattr(ladder, "peak_flops", lambda device, dtype: (1e12, "made up"))
    measured = ladder.Ladder(args, CONFIG, MICRO, 2, {5: "GPUs only"}, "")
    measured.pool = variants.Pool(lambda variant: FakeWorker(variant, fails))
    monkeypatch.setattr(FakeWorker, "log", [])
    return measured


def test_turns_alternate_and_a_process_that_both_pairs_need_goes_on(tmp_path, monkeypatch):
    pairs = ladder.plan(["cumulative"], [1, 3], ALL, CONFIG)[:2]
    fake_ladder(tmp_path, monkeypatch).run(pairs)
    assert FakeWorker.log == [0, 1, 1, 0, 0, 1, 1, 0, "closed",
                              1, 2, 2, 1, 1, 2, 2, 1, "closed", "closed"]


def test_a_variant_that_fails_is_a_row_and_the_next_is_compared_with_the_last_that_worked(
        tmp_path, monkeypatch):
    pairs = ladder.plan(["cumulative"], [1, 3, 7], ALL, CONFIG)[:3]
    rows = fake_ladder(tmp_path, monkeypatch, fails=[pairs[1].after]).run(pairs)
    assert [row.get("ratio") for row in rows] == [2, None, 4]
    assert rows[1]["verdict"] == "failed: out of memory" and rows[2]["before"] == [1]
    written = json.loads((tmp_path / "ladder.json").read_text(encoding="utf-8"))
    assert written["rows"] == rows
    assert "failed: out of memory" in (tmp_path / "ladder.md").read_text(encoding="utf-8")


def test_micro_batches_grow_until_one_does_not_fit(tmp_path, monkeypatch):
    pairs = ladder.plan(["settings"], [], ALL, CONFIG, ["batch-size"])
    rows = fake_ladder(tmp_path, monkeypatch, fails=[pairs[1].after], rounds=2).run(pairs)
    assert [row["name"] for row in rows] == ["batch-size 8", "batch-size 16"]
    assert len(rows[0]["dt"]) == 8 and rows[1]["verdict"] == "failed: out of memory"


# Report and README


def results(*rows):
    return {"environment": common.environment(CPU), "date": "2026-01-02", "preset": "gpt2",
            "tokens_per_update": 2048, "batch_size": 4, "small_batch_size": 2, "block_size": 512,
            "dtype": "bfloat16", "compile": "default", "updates": 8, "rounds": 2,
            "order": ladder.ORDER, "not_applicable": {"5": "GPUs only"},
            "peak_flops": 8.7e11, "peak_flops_source": "measured", "rows": list(rows)}


ROWS = [row_of(1, sample([170] * 5, [171.7, 168, 169, 173, 174])),
        row_of(3, sample([1700] * 4, [3400] * 4), before=[1]),
        row_of(11, sample([100] * 4, [80] * 4), before=[1, 3]),
        row_of(None, sample([170] * 4, [3400] * 4), mode="total")]
TABLE = """# Title
<!-- ladder:begin -->
| # | optimisation | what it saves | proved by | tok/s | x before |
|---|---|---|---|---|---|
| 1 | merged QKV | launches | `a` `b` | | |
| 3 | native ops | kernels | `c` | 1 | old |
| 5 | TF32 | time | `d` | 7 | 8 |
| 11 | recomputation | memory | `e` | | |
| 13 | process group | | `f` | | |

an old line
<!-- ladder:end -->
after
"""


def fill(tmp_path, text=TABLE, content=None, *args):
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    (tmp_path / "ladder.json").write_text(json.dumps(content or results(*ROWS)), encoding="utf-8")
    args = args or ["--ladder", str(tmp_path / "ladder.json")]
    readme_table.main([*args, "--readme", str(tmp_path / "README.md")])
    return (tmp_path / "README.md").read_text(encoding="utf-8")


def test_readme_gets_the_last_two_columns_and_keeps_the_rest(tmp_path):
    text = fill(tmp_path)
    assert "| 1 | merged QKV | launches | `a` `b` | 172 | 1.01 (0.99 to 1.02) |" in text
    assert "| 3 | native ops | kernels | `c` | 3,400 | 2.00 (2.00 to 2.00) |" in text
    assert "| 5 | TF32 | time | `d` | | not here: GPUs only |" in text
    assert "| 11 | recomputation | memory | `e` | 80 | 0.80 (0.80 to 0.80) |" in text
    assert "| 13 | process group | | `f` | | |" in text
    assert "an old line" not in text
    assert text.startswith("# Title\n") and text.endswith("<!-- ladder:end -->\nafter\n")
    caption = " ".join(text.split())
    assert "order 1, 3, 11." in caption
    assert "`00_orig.py` 170 tok/s, some 3,400 tok/s: x 20.00" in caption
    assert "torch " + torch.__version__ in caption and "2,048 tokens per update" in caption
    assert max(map(len, text.splitlines())) <= 120
    assert fill(tmp_path, text) == text


def test_the_projects_readme_has_the_markers_and_a_row_for_every_number():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    content = results(*(row_of(n, sample([100] * 3, [123] * 3)) for n in range(1, 13) if n != 5))
    filled = readme_table.replace_between(
        text, "ladder", lambda old: readme_table.fill_ladder(old, content))
    assert filled.count("1.23 (1.23 to 1.23)") == 11 and filled.count("not here: GPUs only") == 1


def test_readme_gets_what_recomputation_costs_and_saves(tmp_path):
    row = row_of(11, sample([100] * 4, [80] * 4), mode="recompute")
    row["name"], row["peak_memory_bytes"], row["peak_memory_bytes_before"] = "mlp, T = 8", 1e9, 2e9
    text = "a\n<!-- recompute:begin -->\nold\n<!-- recompute:end -->\nz\n"
    args = ["--recompute", str(tmp_path / "ladder.json")]
    filled = fill(tmp_path, text, results(row), *args)
    assert "| mlp, T = 8 | 80 | 0.80 (0.80 to 0.80) | 1.00 GB | 2.00 GB |" in filled
    assert filled.startswith("a\n<!--") and filled.endswith("-->\nz\n") and "old" not in filled
    with pytest.raises(common.UserError, match="have no recompute rows"):
        fill(tmp_path, text, results(*ROWS), *args)


@pytest.mark.parametrize("text, content, message", [
    ("no markers", None, "needs one line <!-- ladder:begin -->"),
    (TABLE.replace("end -->", "end"), None, "below it, one line <!-- ladder:end -->"),
    (TABLE.replace("old", "<!-- ladder:begin -->\n"), None, "needs one line <!-- ladder:begin -->"),
    (TABLE.replace("| `a` `b` |", "|"), None, "5 cells, not 6"),
    (TABLE, results(ROWS[3]), "no cumulative rows")])
def test_readme_stays_as_it_is_where_it_cannot_be_filled(tmp_path, text, content, message):
    with pytest.raises(common.UserError, match=message):
        fill(tmp_path, text, content)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_reference_log_shows_the_validations_of_a_run(tmp_path):
    metrics = [{"step": 0, "val_loss": 10.9, "val_tokens": 5}]
    metrics += [{"step": s, "loss": 10.5 - s, "lr": 1e-3 / (1 + s), "grad_norm": 2 - s / 4 or None,
                 "tok_per_sec": 10.0 if s == 0 else 1000.0 + s}
                for s in range(4)]
    metrics += [{"step": 2, "val_loss": 9.25, "val_tokens": 5},
                {"step": 4, "val_loss": 7.5, "val_tokens": 5}]
    config = {"preset": "tiny", "total_batch_size": 2048, "seed": 1337, "dtype": "bfloat16",
              "compile": "default"}
    summary = {"environment": common.environment(CPU), "script": "01_opt_single_gpu",
               "data": "some text", "cold_start_s": 12.3, "config": config}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    text = "<!-- reference-log:begin -->\nformer\n<!-- reference-log:end -->\n"
    text = fill(tmp_path, text, None, "--log", str(tmp_path))
    lines = [line.split() for line in text.splitlines() if line.startswith("    ")]
    assert lines[1:] == [["0", "10.5000", "10.9000", "1.00e-03", "2.00", "-"],
                         ["2", "8.5000", "9.2500", "3.33e-04", "1.50", "1,001"],
                         ["4", "-", "7.5000", "-", "-", "1,002"]]
    words = " ".join(text.split())
    assert "former" not in words
    assert "2,048 tokens per update" in words and "12 s for the first update" in words
    with pytest.raises(common.UserError, match="not the folder of a finished run"):
        fill(tmp_path, text, None, "--log", str(tmp_path / "nowhere"))


def test_figure_shows_every_row(tmp_path):
    slower = sample([100] * 3, [80] * 3)
    rows = [*ROWS, row_of(3, sample([100] * 3, [110] * 3), mode="alone"),
            row_of(11, slower, mode="recompute", settings=(("block_size", 8),)),
            row_of(None, slower, mode="settings", settings=(("dtype", "float32"),)),
            {**ladder.identify(pair_of(7)), "verdict": "failed: out of memory",
             "losses_agree": True}]
    figure = report.draw(results(*rows))
    speed, memory, ratios, *others = [
        [item.get_text() for item in (*axes.get_yticklabels(), *axes.texts)]
        for axes in figure.axes]
    assert speed == ["00_orig.py", "1 merged QKV", "3 native ops", "11 recomputation",
                     " 170", " 172   x 1.01", " 3,400   x 2.00", " 80   x 0.80"]
    assert ratios == ["1 merged QKV", "3 native ops", "11 recomputation"] and memory[-1] == " 1.0"
    assert others[0][:2] == ["off, T = 8", "recomputation"]
    assert others[2][:2] == ["as chosen", "some"]
    report.write_report(tmp_path, results(*rows))
    assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "ladder.md").read_text(encoding="utf-8")
    assert "| 7 fused AdamW | | | | | | | | failed: out of memory |" in text


# Commands


def test_two_rows_measured_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(common.PRESETS, "tiny", MICRO)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(ladder, "choose_compile", lambda mode, device: ("off", "not tried"))
    with pytest.raises(SystemExit) as end:
        ladder.main(["--rows", "3", "7", "--preset", "tiny", "--device", "cpu",
                     "--batch-size", "2", "--block-size", "16", "--updates", "3", "--rounds", "1",
                     "--out", str(tmp_path / "out é")])
    content = json.loads((tmp_path / "out é" / "ladder.json").read_text(encoding="utf-8"))
    assert end.value.code == 0
    assert [(row["mode"], row["after"]) for row in content["rows"]] == [
        ("cumulative", [3]), ("cumulative", [3, 7]), ("total", [3, 7])]
    for row in content["rows"]:
        assert row["losses_agree"] and row["loss_difference"] < 1e-4 and 10 < row["loss"] < 11.5
        assert len(row["dt"]) == len(row["dt_before"]) == 3
        assert row["cold_start_s"][0] > 0 and row["tok_per_sec"] > 0
        assert 1e8 < row["peak_memory_bytes"] < 1e10
    assert content["small_batch_size"] == 1 and content["tokens_per_update"] == 32
    assert "[7] fused AdamW" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out é").iterdir()} == {
        "ladder.json", "ladder.md", "ladder.png"}


def test_losses_that_differ_are_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "choose_compile", lambda mode, device: ("off", "not tried"))
    monkeypatch.setattr(ladder, "Worker", lambda variant, task, cache: FakeWorker(variant))
    monkeypatch.setattr(FakeWorker, "loss", lambda self: float(len(self.variant.numbers)))
    with pytest.raises(SystemExit) as end:
        ladder.main(["--rows", "3", "--device", "cpu", "--batch-size", "2", "--out", str(tmp_path)])
    assert end.value.code == 1
    assert "LOSSES DIFFER (limit 0.001)" in (tmp_path / "ladder.md").read_text(encoding="utf-8")


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path, monkeypatch):
    def worker(variant, task, cache):
        if variant.numbers == {1, 3}:
            raise KeyboardInterrupt
        return FakeWorker(variant)

    monkeypatch.setattr(ladder, "choose_compile", lambda mode, device: ("off", "not tried"))
    monkeypatch.setattr(ladder, "Worker", worker)
    with pytest.raises(KeyboardInterrupt):
        ladder.main(["--rows", "1", "3", "--device", "cpu", "--batch-size", "2",
                     "--out", str(tmp_path)])
    content = json.loads((tmp_path / "ladder.json").read_text(encoding="utf-8"))
    assert [row["number"] for row in content["rows"]] == [1]
    assert (tmp_path / "ladder.png").exists()


def test_a_process_that_cannot_train_says_why():
    variant = variants.Variant(frozenset())
    short = common.GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=64)
    with pytest.raises(variants.Failed, match="IndexError"):
        variants.Worker(variant, (variant.configure(CONFIG, 2), short), "")
    assert variants.why(MemoryError()) == "out of memory"
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    assert variants.why(error) == "out of memory"


@pytest.mark.parametrize("args, message", [
    (["--preset", "huge"], "--preset huge: there are auto, tiny"),
    (["--updates", "2"], "quartiles need 3"),
    (["--rounds", "0"], "--rounds 0"), (["--rows", "13"], "there are 1 to 12"),
    (["--block-size", "999"], "positions for 256"), (["--rows", "5"], "nothing to measure"),
    (["--batch-size", "4", "--small-batch-size", "3"], "must divide"),
    (["--out", __file__], "cannot be made")])
def test_bad_arguments_are_one_line(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "choose_compile", lambda mode, device: ("off", "not tried"))
    with pytest.raises(common.UserError, match=message):
        ladder.main(["--device", "cpu", *args])


@pytest.mark.parametrize("B, small", [
    (1, 1), (2, 1), (4, 2), (6, 3), (7, 1), (8, 4), (10, 2), (64, 4)])
def test_the_small_micro_batch_divides_the_larger(B, small):
    assert ladder.small_batch(ladder.parse_args([]), ladder.replace(CONFIG, batch_size=B)) == small


needs_bash = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("bash"),
                                reason="gpu.sh is for Linux")
STUB = """#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
for arg; do [ "$before" = --out ] && mkdir -p "$arg" && touch "$arg/trace.json"; before=$arg; done
"""


def gpu_sh(out, *parts, timeout=120, **env):
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(out), *parts]
    return subprocess.run(command, env=environ(**env), capture_output=True, text=True,
                          timeout=timeout)


@needs_bash
@pytest.mark.parametrize("dry_run", ["0", "1"])
def test_every_command_of_gpu_sh_has_arguments_that_exist(tmp_path, dry_run):
    """With a stub for python, fast: what the lines call is then parsed by the real commands."""
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    done = gpu_sh(tmp_path / "out", DRY_RUN=dry_run, PYTHON=str(stub), CALLS=str(calls))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [shlex.split(line) for line in calls.read_text().splitlines() if ".py" in line]
    ladders = [line[1:] for line in lines if line[0] == "benchmarks/ladder.py"]
    parsed = [ladder.parse_args(args) for args in ladders]
    for args in parsed:
        args.out = str(tmp_path)
        ladder.check_args(args)
        assert args.device == ("cpu" if dry_run == "1" else "cuda")
    assert [args.mode for args in parsed] == [
        ["cumulative"], ["settings"], ["settings"], ["recompute"], ["leave-one-out"], ["settings"]]
    training = [line[1:] for line in lines if line[0] == "01_opt_single_gpu.py"]
    assert [run.parse_config(single.Config, "", args).profile for args in training] == [True]
    checks = [line[2:] for line in lines if line[0] == "check_numerics.py"]
    dry, real = ["--device", "cpu", "--only", "merged_qkv"], ["--device", "cuda"]
    assert checks == [dry if dry_run == "1" else real]
    assert "merged_qkv" in check_numerics.CHECKS
    again = gpu_sh(tmp_path / "out", DRY_RUN=dry_run, PYTHON="false")
    assert again.returncode == 0  # all done: nothing is run again


@needs_bash
def test_a_part_that_fails_or_is_late_does_not_stop_the_others(tmp_path):
    done = gpu_sh(tmp_path / "out", "numerics", "environment", PYTHON="false", DRY_RUN="1")
    assert done.returncode == 1 and "numerics: exit code 1" in done.stdout
    assert "not done: numerics environment" in done.stdout
    late = gpu_sh(tmp_path / "out", BUDGET="5", PYTHON="false", DRY_RUN="1")
    assert late.returncode == 1 and "exit code" not in late.stdout
    unknown = gpu_sh(tmp_path / "out", "nonsense")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("gpu.sh: no part nonsense; there are:")


@needs_bash
def test_gpu_sh_for_real_at_sizes_too_small_to_mean_anything(tmp_path):
    done = gpu_sh(tmp_path / "out", "environment", "ladder", "profile",
                  DRY_RUN="1", PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    assert json.loads((out / "ladder" / "ladder.json").read_text())["rows"][0]["number"] == 3
    assert (out / "profile" / "trace.json.gz").stat().st_size > 1000
    assert f"torch {torch.__version__}" in (out / "environment.log").read_text()
    assert not os.path.exists(ROOT / "log" / "gpu")


def test_help_needs_nothing():
    done = command(ROOT / "benchmarks" / "ladder.py", "--help", cwd=ROOT)
    assert done.returncode == 0 and "leave-one-out" in done.stdout
